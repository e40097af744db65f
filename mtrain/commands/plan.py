"""``mtrain plan``: print what a job would do, on one backend, or on two as a diff."""

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, job_options, spec_argument, spec_request
from mtrain.commands.training_request import TrainRequest
from mtrain.errors import SpecError
from mtrain.spec import terminal
from mtrain.spec.request import SpecRequest

if TYPE_CHECKING:
    from mtrain.jobs.plan.plan import Plan
    from mtrain.spec.config import Loaded


@click.command(
    "plan",
    cls=JobCommand,
    examples=(
        ("mtrain plan -c yolov5n_bccd", "the commands, the memory and the facts of each rank"),
        ("mtrain plan -c yolov5n_bccd --diff ddp fleet", "what two backends do differently"),
    ),
)
@job_options
@spec_argument
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--diff", nargs=2, metavar="BACKEND BACKEND", help="Compare the plans of two backends.")
def plan(**params: Any) -> None:
    """Print the commands, the environment and the numbers of a job, and start nothing."""

    def request(**chosen: str) -> TrainRequest:
        return TrainRequest(spec=spec_request({**params, **chosen}), resume=params["resume"])

    if params["diff"]:
        terminal.say(diff_plans([(backend, request(backend=backend)) for backend in params["diff"]]), nl=False)
        return
    found = plan_or_request(request(), tell=lambda note: terminal.say(note, err=True))
    if isinstance(found, str):
        terminal.say(found, nl=False)
    elif params["as_json"]:
        terminal.say(json.dumps(found.as_json(), indent=2))
    else:
        terminal.say(found.text(), nl=False)


def plan_job(request: TrainRequest, *, tell: Callable[[str], None] = lambda note: None) -> "Plan":
    """Return the plan of a job; ``tell`` receives the notes on its spec.

    Raises:
        UsageError: the spec is wrong, or there is nothing to resume.
    """
    request = request.with_latest_run()
    return _make_plan(request, request.load(), tell)


def plan_or_request(request: TrainRequest, *, tell: Callable[[str], None]) -> "Plan | str":
    """Return the plan of a job, or its request for a scheduler, where the spec chooses one and names no host.

    Raises:
        UsageError: the spec is wrong, there is nothing to resume, or the job cannot be submitted.
    """
    from mtrain.spec import package_parts

    loaded = request.load()
    cluster = loaded.job.cluster
    if cluster is not None and not loaded.spec.cluster.ips and cluster.queue() is not None:
        key = f"cluster.name: {loaded.spec.cluster.name}"
        text: str = package_parts.load("submissions", "queues", key).prepare(loaded).request
        return text
    return _make_plan(request, loaded, tell)


def diff_plans(requests: Sequence[tuple[str, TrainRequest]]) -> str:
    """Return a unified diff of the plans of a job on two backends, both with one port, so that only real differences show.

    Args:
        requests: the names of the two backends, each with its request.
    """
    from mtrain.jobs.hosts import allocated_hosts
    from mtrain.jobs.place import locate
    from mtrain.jobs.plan.machine import here, typed_line
    from mtrain.jobs.plan.plan import make_plan

    texts = []
    machine = None
    # One machine with one free port for both: else the port would be a difference in each diff.
    for backend, request in requests:
        loaded = allocated_hosts.complete(request.load())
        machine = replace(machine or here(loaded), line=_line_for(backend, typed_line()))
        where = locate(loaded, resume=request.resume)
        text = make_plan(loaded, run_dir=where.run, resume=where.checkpoint, machine=machine).text()
        # A flag on each line, so that the diff shows the flag that differs and not the whole command.
        texts.append(text.replace(" --", "\n    --").splitlines(keepends=True))
    first, second = (backend for backend, _ in requests)
    return "".join(difflib.unified_diff(texts[0], texts[1], fromfile=first, tofile=second, n=1))


def read_for_showing(request: SpecRequest) -> "Loaded":
    """Return a spec with the hosts of the allocation, for commands that show it; an allocation of no use is left out."""
    from mtrain.jobs.hosts import allocated_hosts

    return allocated_hosts.complete_if_possible(request.read(request.config))


def _make_plan(request: TrainRequest, loaded: "Loaded", tell: Callable[[str], None]) -> "Plan":
    from mtrain.jobs.hosts import allocated_hosts
    from mtrain.jobs.place import locate
    from mtrain.jobs.plan import mesh as plan_mesh
    from mtrain.jobs.plan.plan import make_plan
    from mtrain.system import plugin_packages

    loaded = allocated_hosts.complete(loaded)
    missing = plugin_packages.missing(loaded.job, is_script=loaded.script is not None)
    for note in [*loaded.notes, *([missing] if missing else [])]:
        tell(note)
    _check_model(loaded, tell)
    where = locate(loaded, resume=request.resume)
    planned = make_plan(loaded, run_dir=where.run, resume=where.checkpoint)
    return replace(planned, numbers={**planned.numbers, **plan_mesh.rows(loaded, size=planned.size)})


def _check_model(loaded: "Loaded", tell: Callable[[str], None]) -> None:
    """Refuse a model whose files cannot be read; of a job on hosts that are named, which may have others, only tell it."""
    if loaded.script is not None or loaded.spec.backend.python not in (None, sys.executable):
        return
    try:
        loaded.job.model.check_libraries()
    except SpecError as error:
        if not loaded.spec.cluster.ips:
            raise
        tell(f"on this machine: {error}")


def _line_for(backend: str, typed: Sequence[str]) -> list[str]:
    """Return the command that would be typed for one of the two backends: ``typed`` without ``--diff``."""
    command: list[str] = []
    words = iter(typed)
    for word in words:
        if word.partition("=")[0] != "--diff":
            command.append(word)
            continue
        next(words)
        if word == "--diff":
            next(words)
    return [*command, "--backend", backend]
