"""Jobs in the queue of a scheduler, from Python: what ``mtrain submit``, ``status``, ``logs`` and ``cancel`` do."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.commands import python_calls
from mtrain.commands.training_request import TrainRequest
from mtrain.spec.calls import explained
from mtrain_clusters import queue
from mtrain_clusters.queue import SubmittedJob


@explained
def submit(  # noqa: PLR0913 - what the command takes
    spec: python_calls.SpecSource = None,
    *,
    cluster: str,
    nodes: int | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    script: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
) -> SubmittedJob:
    """Give a job to the queue of a scheduler, and return at once.

    Args:
        spec: see ``mtrain.commands.functions``; as ``backend``, ``ranks`` and ``overrides``.
        cluster: replaces ``cluster.name``, for example "slurm".
        nodes: number of hosts to ask for.
        options: the cluster's own options, such as ``{"partition": "gpu", "time": "1:00:00"}``.
        backend: replaces ``backend.name``.
        ranks: number of ranks on each host.
        overrides: further values of the spec.
        script: your own script, which calls ``mtrain.session()``, to run in place of training the spec.
        arguments: arguments of the script.

    Raises:
        UsageError: the job cannot be planned, or the scheduler refuses it; nothing was submitted.
    """
    values: dict[str, Any] = {**(overrides or {}), "cluster.name": cluster}
    if nodes is not None:
        values["cluster.nodes"] = nodes
    values |= {f"cluster.options.{key}": value for key, value in (options or {}).items()}
    job = TrainRequest(
        spec=python_calls.spec_request(spec, backend=backend, ranks=ranks, overrides=values),
        script=None if script is None else Path(script),
        arguments=[os.fspath(word) for word in arguments],
    )
    return queue.submit(queue.SubmitRequest(job=job))


@explained
def open_job(number: str | None = None, *, runs: str | os.PathLike[str] = "runs") -> SubmittedJob:
    """Find a job that was submitted, by its id or the name of its run; None: the newest one.

    Raises:
        UsageError: there is none.
    """
    return queue.find(Path(runs).absolute(), number)
