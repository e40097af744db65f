"""Plans: the commands, the environment and the numbers of a training job, of which nothing is started."""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mtrain.api.training import TrainRequest
from mtrain.errors import SpecError
from mtrain.jobs import plan_mesh, plan_sent, start, submission
from mtrain.jobs.hosts import allocated_hosts
from mtrain.jobs.plan import Plan
from mtrain.spec.request import SpecRequest
from mtrain.system import plugin_packages

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def plan(request: TrainRequest, *, tell: Callable[[str], None] = lambda note: None) -> Plan:
    """Return the plan of a job; ``tell`` receives the notes on its spec.

    Raises:
        UsageError: the spec is wrong, or there is nothing to resume.
    """
    request = request.settled()
    return _planned(request, request.load(), tell)


def plan_or_request(request: TrainRequest, *, tell: Callable[[str], None]) -> Plan | str:
    """Return the plan of a job, or its request for a scheduler, where the spec chooses one and names no host.

    Raises:
        UsageError: the spec is wrong, there is nothing to resume, or the job cannot be submitted.
    """
    loaded = request.load()
    cluster = loaded.job.cluster
    if cluster is not None and not loaded.spec.cluster.ips and cluster.queue() is not None:
        return submission.prepare(loaded).request
    return _planned(request, loaded, tell)


def difference(requests: Sequence[tuple[str, TrainRequest]]) -> str:
    """Return a unified diff of the plans of a job on two backends, both with one port, so that only real differences show.

    Args:
        requests: the names of the two backends, each with its request.
    """
    texts = []
    machine = None
    for backend, request in requests:
        loaded = allocated_hosts.completed(request.load())
        machine = replace(machine or start.here(loaded), line=_line_for(backend, start.typed_line()))
        where = start.locate(loaded, resume=request.resume)
        text = start.planned(loaded, where, machine=machine).text()
        texts.append(text.replace(" --", "\n    --").splitlines(keepends=True))
    first, second = (backend for backend, _ in requests)
    return "".join(difflib.unified_diff(texts[0], texts[1], fromfile=first, tofile=second, n=1))


def described(request: SpecRequest) -> "Loaded":
    """Return a spec with the hosts of the allocation, for commands that show it; an allocation of no use is left out."""
    return allocated_hosts.described(request.read(request.config))


def _planned(request: TrainRequest, loaded: "Loaded", tell: Callable[[str], None]) -> Plan:
    loaded = allocated_hosts.completed(loaded)
    missing = plugin_packages.missing(loaded.job, is_script=loaded.script is not None)
    for note in [*loaded.notes, *([missing] if missing else [])]:
        tell(note)
    _check_model(loaded, tell)
    planned = start.planned(loaded, start.locate(loaded, resume=request.resume))
    more = {
        **plan_mesh.rows(loaded, size=planned.size, on_cpu=planned.on_cpu),
        **plan_sent.rows(loaded, size=planned.size, on_cpu=planned.on_cpu),
    }
    return replace(planned, numbers={**planned.numbers, **more})


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
