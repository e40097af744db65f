"""``mtrain stacks``: where in their code the ranks of a running job are."""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.errors import UsageError
from mtrain.jobs.watch.report import number_rows
from mtrain.spec import terminal
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes
from mtrain.spec.hostnames import few as few_hosts
from mtrain.system import attempts, processes
from mtrain.system.stacks import Frame, Stack, ask

_LIBRARY = re.compile(r".*/(?:(?:site|dist)-packages|lib(?:64)?/python3\.\d+)/")
"""What is left out of the names of files: the folder of Python's or of installed packages."""
STATES = {"D": "waits in the kernel, for a disk as a rule", "T": "stopped by a signal", "t": "stopped by a debugger"}
"""The kernel's letters for states of a process that explain why it does not go on."""


@click.command(
    "stacks",
    cls=Command,
    examples=(
        ("mtrain stacks runs/digits", "all ranks of this host; those at the same place on one line"),
        ("mtrain stacks runs/train --rank 1", "every call of rank 1 and of its children"),
    ),
)
@click.argument("run", default="runs/latest", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="This rank alone, with every call.")
def stacks(run: Path, *, rank: int | None) -> None:
    """Show where in their code the ranks of a running job are, and their children; of RUN, else of runs/latest.

    The ranks go on as if they had not been asked. Each line begins with the innermost call in the user's own code.
    """
    nodes = living_ranks(run)
    pids = {rank: pid for ranks in nodes.values() for rank, pid in ranks.items()}
    if rank is not None and rank not in pids:
        raise UsageError(f"--rank {rank}: the ranks of {run} that run on this host are {few(pids)}")
    asked = sorted(pids) if rank is None else [rank]
    found = ask([pids[each] for each in asked])
    for lines in describe({each: found[pids[each]] for each in asked}, every_call=rank is not None):
        terminal.say(lines)
    children = {each: processes.ids_below(pids[each]) for each in asked}
    found = ask([pid for each in children.values() for pid in each])
    for lines in describe_children(children, found, every_call=rank is not None):
        terminal.say(lines)
    others = [] if rank is not None else _unasked_hosts(run, nodes)
    if others:
        terminal.say(f"not asked: {few_hosts(others)}; there: mtrain stacks {shlex.quote(str(run))}")


def living_ranks(run: Path) -> dict[int, dict[int, int]]:
    """Return the ranks of a run that live on this host: number of the host -> rank -> process.

    Raises:
        UsageError: there is none.
    """
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; give the folder of a run, such as runs/digits")
    numbers = (path.name.removeprefix(".ranks-") for path in run.glob(".ranks-*"))
    found = {node: attempts.living_ranks(run, node) for node in sorted(int(each) for each in numbers if each.isdigit())}
    nodes = {node: ranks for node, ranks in found.items() if ranks}
    if not nodes:
        raise UsageError(
            f"{run}: no rank of it runs on this host; it has ended, or not begun yet, or runs on other hosts; see {run / 'logs'}"
        )
    return nodes


def describe(found: Mapping[int, Stack], *, every_call: bool = False) -> Iterator[str]:
    """Yield where ranks are: one line for all that are at the same place."""
    groups: dict[str, list[int]] = {}
    for rank, stack in found.items():
        groups.setdefault(place(stack, every_call=every_call), []).append(rank)
    for words, ranks in groups.items():
        yield f"rank{'s' if len(ranks) > 1 else ''} {few(ranks)}{words}"


def describe_children(
    children: Mapping[int, Sequence[int]], found: Mapping[int, Stack], *, every_call: bool = False
) -> Iterator[str]:
    """Yield where children of ranks are: one line for all that are at the same place. ``children``: processes of each rank."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for rank, pids in children.items():
        for pid in pids:
            stack = found[pid]
            # A program that is not Python, such as a compiler, has a name instead.
            name = f" ({processes.name_of(pid)})" if stack.how == "none" else ""
            groups.setdefault(name + place(stack, every_call=every_call), []).append((rank, pid))
    for words, those in groups.items():
        ranks = sorted({rank for rank, _ in those})
        whose = f"of rank{'s' if len(ranks) > 1 else ''} {few(ranks)}"
        count = f"{len(those)} children" if len(those) > 1 else f"child {those[0][1]}"
        yield f"{count} {whose}{words}"


def place(stack: Stack, *, every_call: bool = False) -> str:
    """Return where a process is: its state if that says more, the innermost call in the user's own code, the innermost of all."""
    state = f" ({STATES[stack.state]})" if stack.state in STATES else ""
    if not stack.frames:
        return f"{state}: no stack: {stack.why}"
    if every_call:
        return f"{state}:" + "".join(f"\n  {_call(frame)}" for frame in stack.frames)
    innermost, own = stack.frames[0], stack.own
    if own in (None, innermost):
        return f"{state}: {_call(innermost)}"
    return f"{state}: {_call(own)}, in {_call(innermost)}"


def _call(frame: Frame | None) -> str:
    return "" if frame is None else f"{_LIBRARY.sub('', frame.file)}:{frame.line} {frame.function}"


def few(numbers: Iterable[int]) -> str:
    """Return numbers for a message, in a row as ``4 to 7``."""
    return ", ".join(number_rows(numbers))


def _unasked_hosts(run: Path, nodes: Collection[int]) -> list[str]:
    """Return the hosts of a job that are not this one; it has the numbers ``nodes``."""
    try:
        commands = parse_json(read_bytes(run / "plan.json", limit=MAX_OWN_BYTES))["commands"]
        hosts = [str(command["host"]) for command in commands]
    except (OSError, ValueError, LookupError, TypeError):  # the first host alone has the plan
        return [] if set(nodes) <= {0} else ["host 0 and others"]
    return [host for node, host in enumerate(hosts) if node not in nodes]
