"""``mtrain submit``: give a job to the queue of a scheduler, such as Slurm or Kubernetes."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mtrain.commands import python_calls
from mtrain.commands.options import job_options, spec_request
from mtrain.commands.run import ScriptCommand
from mtrain.commands.training_request import TrainRequest
from mtrain.errors import UsageError
from mtrain.spec import terminal
from mtrain.spec.calls import explain_calls

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded
    from mtrain_clusters.queued_job import SubmittedJob

F = TypeVar("F", bound=Callable[..., Any])

QUEUE_FLAGS: Sequence[tuple[tuple[str, ...], str]] = (
    (("-t", "--time"), "Time limit, as the scheduler writes it."),
    (("-p", "--partition"), "Partition of Slurm."),
    (("-A", "--account"), "Account that is charged."),
    (("--qos",), "Quality of service."),
    (("--gres",), "Generic resources on each host, such as gpu:2."),
    (("--signal",), "Signal before the time limit, such as USR1@120; USR1 saves."),
    (("--image",), "Container image."),
    (("--namespace",), "Namespace of Kubernetes."),
)
"""Flags of schedulers, which set ``cluster.options.<name>``."""


def queue_options(command: F) -> F:
    """Add the flags of schedulers to a command."""
    # click adds options from the last one to the first.
    for names, text in reversed(QUEUE_FLAGS):
        command = click.option(*names, help=text)(command)
    return click.option("--requeue/--no-requeue", default=None, help="Back into the queue after a preemption.")(command)


def with_queue_flags(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command with the flags of schedulers as values of the spec.

    ``-o slurm.KEY=VALUE`` means ``-o cluster.options.KEY=VALUE`` with ``--cluster slurm``.
    """
    overrides = list(params.get("overrides") or ())
    if cluster := params.get("cluster"):
        prefix = f"{cluster}."
        overrides = [
            f"cluster.options.{text.removeprefix(prefix)}" if text.startswith(prefix) else text for text in overrides
        ]
    from mtrain.spec.config import Given

    flags = {}
    for names, _ in (*QUEUE_FLAGS, (("--requeue",), "")):
        name = names[-1].removeprefix("--")
        if (value := params.get(name)) is not None:
            text = f"--{name} {shlex.quote(value)}" if isinstance(value, str) else f"--{'' if value else 'no-'}{name}"
            flags[f"cluster.options.{name}"] = Given(value, text)
    return {**params, "overrides": tuple(overrides), "flags": flags}


@click.command(
    "submit",
    cls=ScriptCommand,
    examples=(
        ("mtrain submit -c spec.yml --cluster slurm --nnodes 2", "give the job to Slurm"),
        ("mtrain status", "its state"),
    ),
)
@job_options
@queue_options
@click.argument("script", metavar="[SCRIPT]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ITS ARGUMENTS]")
def command(script: str | None, arguments: tuple[str, ...], **params: Any) -> None:
    """Give a job to a scheduler: a spec, or your own SCRIPT that calls mtrain.session().

    The job is checked here first. `mtrain status`, `logs` and `cancel` know it by its id.
    """
    job = TrainRequest(
        spec=spec_request(with_queue_flags(params)),
        resume=params["resume"],
        any_name=True,
        script=None if script is None else Path(script),
        arguments=arguments,
    )
    if params["dry_run"]:
        from mtrain_clusters import submission

        terminal.say(submission.prepare(_load(job, params["name"])).standalone, nl=False)
        return
    submitted = hand_over(job, params["name"], tell=lambda note: terminal.say(note, err=True)).job
    terminal.say(f"submitted job {submitted.id} to {submitted.cluster}: run {submitted.name}")
    terminal.say(f"request: {submitted.request}")
    terminal.say(f"next: mtrain status {submitted.id} | mtrain logs -f {submitted.id} | mtrain cancel {submitted.id}")


@explain_calls
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
) -> "SubmittedJob":
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
    return hand_over(job)


def hand_over(
    job: TrainRequest, name: str | None = None, *, tell: Callable[[str], None] = lambda note: None
) -> "SubmittedJob":
    """Check a job and hand it to the scheduler.

    Args:
        job: the job; ``resume`` names the run that it continues, otherwise ``report.name`` does.
        name: name of the run that was typed; None: none was.
        tell: receives the notes on its spec.

    Raises:
        UsageError: the job cannot be planned, or the scheduler refuses it; nothing was submitted.
    """
    from mtrain_clusters import submission
    from mtrain_clusters.queued_job import SubmittedJob

    loaded = _load(job, name)
    prepared = submission.prepare(loaded)
    for note in loaded.notes:
        tell(note)
    return SubmittedJob(submission.submit(prepared), Path(loaded.spec.report.dir).absolute())


def _load(job: TrainRequest, name: str | None) -> "Loaded":
    """Return the spec of the job, with what was chosen for the run that it continues.

    That is the run that ``resume`` names, else the one of ``report.name``. A job starts in the queue with ``--resume if-any``.
    """
    from mtrain.jobs.place import resolve_resume
    from mtrain.jobs.resume import find, load
    from mtrain.spec.config import Given
    from mtrain_clusters import submission

    job = job.with_latest_run()
    config = job.spec.config
    if job.resume == find.AUTO:
        job = replace(job, resume=str(resolve_resume(job.read_spec(None), resume=find.AUTO).run))
    if job.resume not in (None, find.IF_ANY):
        run = submission.resumed_run(str(job.resume))
        if name not in (None, run.name):
            raise UsageError(f"--resume {run} and --name {name}: name two runs; leave one of them out")
        job = replace(job, resume=str(run))
        place = {"report.name": Given(run.name, f"--name {run.name}"), "report.dir": str(run.parent)}
        return load.load_spec(
            lambda values: job.read_spec(values, place), resume=job.resume, config=config, is_queued=True
        )
    loaded = job.read_spec(None)
    if not loaded.spec.report.name or loaded.spec.cluster.options.get("array"):
        return loaded  # a new run, or one for each index
    return load.load_spec(job.read_spec, resume=find.IF_ANY, config=config, is_queued=True)
