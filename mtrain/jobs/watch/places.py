"""The place of a rank in its code, in words: whether it waits for the others, and in which line of whose program."""

import itertools
import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mtrain.system import stacks
from mtrain.system.log_limit import end_of
from mtrain.system.stacks import Frame, Stack

Kind = Literal["waits", "backward", "lock", "person", "children", "runs", "unknown"]
"""``backward``: computes gradients, or waits where they are exchanged; the former takes processor time."""
MAX_CHILDREN = 16
"""Most children of a rank that are asked where they are."""
LOG_BYTES = 256 << 10
"""How much of a log is searched for what Horovod says of a hang, from its end."""

_COLLECTIVES = re.compile(
    r"/(?:torch/distributed|horovod|paddle/distributed|deepspeed/comm|mtrain/backends)/|/torch/csrc/distributed/"
)
"""Files of libraries in which a rank waits for the others."""
_CALLS = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|scatter|gather|reduce|send|recv|rendezvous|"
    r"init_process_group|init_parallel_env"
)
_BACKWARD = (("torch/autograd/graph.py", "_engine_run_backward"), ("tensor_patch_methods.py", "backward"))
"""Calls that exchange gradients outside Python: whoever is idle in one waits for the others."""
_PEOPLE = re.compile(r"/(?:pdb|bdb|code|cmd)\.py$|/(?:debugpy|ipdb|pudb|IPython|remote_pdb)/|/_?pydevd")
_INPUT = re.compile(r"\binput\s*\(|\bbreakpoint\s*\(|stdin\.read")
_CHILDREN = re.compile(
    r"/(?:selectors|subprocess)\.py$|/multiprocessing/(?:connection|queues|synchronize|popen_\w+|pool)\.py$|/loader/\w+\.py$|"
    r"/(?:torch|paddle)/.*/dataloader\w*\.py$|/(?:threading|queue)\.py$"
)
"""Files in which a rank waits for its children, as for processes that load data."""
_LOADERS = re.compile(r"/loader/\w+\.py$|/dataloader\w*\.py$")
_SPLIT = re.compile(r"/fsdp/|/deepspeed/runtime/zero/")
"""Files of libraries that split weights over the ranks."""
_PURPOSES = (
    ("core/update/order.py", "the gradients"),
    ("core/ranks/agreement.py", "what ranks agree on after an update"),
    ("core/checkpoint/", "a checkpoint"),
    ("rank/spec/evaluat", "an evaluation"),
    ("core/evaluate.py", "an evaluation"),
)
"""How the names of mtrain's files end or begin -> what is sent there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process is."""

    kind: Kind
    what: str = ""
    """The call in which it waits; for a person: what for."""
    where: str = ""
    """File and line of the user's own code, ``train.py:41``; of a spec's rank, which has none, the innermost line."""
    why: str = ""
    """Why this is unknown."""
    children: tuple[tuple[int, str], ...] = ()
    """The children for which it may wait, and where they are."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Place":
        """Read what ``ask`` has written into a message."""
        return cls(**{**message, "children": tuple((int(pid), str(where)) for pid, where in message["children"])})


def place_of(stack: Stack, *, idle: bool) -> Place:
    """Return the place that a stack shows; ``idle``: whether the process has done nothing lately."""
    frames = stack.frames
    if not frames:
        return Place(kind="unknown", why=stack.why)
    own, top = stack.own, frames[0]
    where = _words(own or top)
    if own is top:  # A user's folder may be named as a library.
        asks = idle and _INPUT.search(linecache.getline(top.file, top.line))
        return Place(kind="person", what="input", where=where) if asks else Place(kind="runs", where=where)
    if top.file.endswith("file_baton.py"):
        return Place(kind="lock", where=where)
    if any(_PEOPLE.search(frame.file) for frame in frames[:8]):
        return Place(kind="person", what="a debugger", where=where)
    if any(top.file.endswith(file) and top.function == function for file, function in _BACKWARD):
        kind: Kind = "waits" if idle else "backward"
        return Place(kind=kind, what="the exchange of the gradients", where=where if own else "")
    if _is_collective(frames, own):
        return Place(kind="waits", what=_call(frames), where=where if own else "")
    if idle and _CHILDREN.search(top.file):
        return Place(kind="children", what=top.function, where=where)
    return Place(kind="runs", where=where)


def _is_collective(frames: Sequence[Frame], own: Frame | None) -> bool:
    """Return whether the innermost call is a collective one, or Python's waiting for a message of one."""
    inside = list(itertools.takewhile(lambda frame: _CHILDREN.search(frame.file), frames))
    if len(inside) == len(frames) or frames[len(inside)] is own or any(_LOADERS.search(each.file) for each in inside):
        return False
    return _COLLECTIVES.search(frames[len(inside)].file) is not None


def is_exchange(file: str) -> bool:
    """Return whether ranks exchange something in a file of a library."""
    return _COLLECTIVES.search(file) is not None or file.endswith(tuple(name for name, _ in _BACKWARD))


def _call(frames: Sequence[Frame]) -> str:
    """Return the name of the collective call in which a rank waits, and what mtrain sends by it."""
    inside = [frame for frame in frames if _COLLECTIVES.search(frame.file)]
    named = [match[0] for frame in inside if (match := _CALLS.search(frame.function))]
    name = named[0] if named else "the exchange"
    for frame in frames:
        for part, purpose in _PURPOSES:
            if f"/mtrain/{part}" in frame.file:
                # Weights that are split are gathered in the same update as gradients are exchanged.
                gathers = name == "all_gather" and any(_SPLIT.search(each.file) for each in frames)
                return f"{name} of {'the weights' if gathers else purpose}"
    return name if named else inside[0].function


def _words(frame: Frame) -> str:
    relative = os.path.relpath(frame.file)
    return f"{Path(frame.file).name if relative.startswith('..') else relative}:{frame.line}"


def ask(pids: Mapping[int, int], *, idle: Mapping[int, bool], children: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Ask ranks where they are, and the children of those that wait for some; return it for a message.

    Args:
        pids: rank -> process.
        idle: rank -> whether it has done nothing lately.
        children: process -> its children.
    """
    found: dict[str, Any] = {}
    asked = stacks.ask(list(pids.values()))
    for rank, pid in pids.items():
        place = place_of(asked[pid], idle=idle.get(rank, False))
        below: list[tuple[int, str]] = []
        if place.kind == "children":
            ids = children.get(pid, ())[:MAX_CHILDREN]
            below = [(child, _child_words(stack)) for child, stack in stacks.ask(ids).items()]
        found[str(rank)] = {**asdict(place), "children": below}
    return found


def _child_words(stack: Stack) -> str:
    if not stack.frames:
        return f"unknown: {stack.why}"
    return _words(stack.own or stack.frames[0])


def missing_ranks(log: Path, *, start: int) -> list[int]:
    """Return the ranks of which Horovod says, in the part of a log after byte ``start``, that others wait for them."""
    text = end_of(log, start=start, limit_bytes=LOG_BYTES)
    # The last one counts. Its lines are `1: [name, name ...]`, and those of a mismatch name all ranks.
    block = text.rpartition("Missing ranks:")[2] if "Missing ranks:" in text else ""
    ranks = []
    for line in block.strip().splitlines():
        match = re.match(r"(\d+)!?: \[", line)
        if match is None:
            break
        ranks.append(int(match[1]))
    return ranks
