"""``mtrain submit``: give a job to the queue of a scheduler, such as Slurm or Kubernetes."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mtrain.cli.options import job_options, load_job
from mtrain.cli.run import ScriptCommand

F = TypeVar("F", bound=Callable[..., Any])

QUEUE_FLAGS: Sequence[tuple[tuple[str, ...], str]] = (
    (("-t", "--time"), "Time limit, as the scheduler writes it."),
    (("-p", "--partition"), "Partition of Slurm."),
    (("-A", "--account"), "Account that is charged."),
    (("--qos",), "Quality of service."),
    (("--gres",), "Generic resources on each host, such as gpu:2."),
    (("--array",), "Indices of a job array, such as 1-3: one job for each, with the index as its seed."),
    (("--signal",), "Signal before the time limit, such as USR1@120; USR1 saves."),
    (("--image",), "Container image."),
    (("--namespace",), "Namespace of Kubernetes."),
)
"""Flags of schedulers, which set ``cluster.options.<name>``."""


def queue_options(command: F) -> F:
    """Add the flags of schedulers to a command."""
    for names, text in reversed(QUEUE_FLAGS):
        command = click.option(*names, help=text)(command)
    return click.option("--requeue/--no-requeue", default=None, help="Back into the queue after a preemption.")(command)


def with_queue_flags(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command with the flags of schedulers as values of the spec.

    ``-o slurm.KEY=VALUE`` means ``-o cluster.options.KEY=VALUE`` with ``--cluster slurm``.
    """
    overrides = list(params.get("overrides") or ())
    cluster = params.get("cluster")
    if cluster:
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


@click.command("submit", cls=ScriptCommand)
@job_options
@queue_options
@click.argument("script", metavar="[SCRIPT]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ITS ARGUMENTS]")
def submit(script: str | None, arguments: tuple[str, ...], **params: Any) -> None:
    """Give a job to a scheduler: a spec, or your own SCRIPT that calls mtrain.session().

    The job is checked here first. `mtrain status`, `logs` and `cancel` know it by its id.
    """
    from mtrain.cluster import submission

    if params.get("resume") not in (None, "if-any"):
        raise click.UsageError(
            "--resume: a submitted job continues the run of its name if there is one; name it with --name, or start "
            "from other weights with -o model.weights=FILE"
        )
    params = with_queue_flags(params)
    if script is not None:
        from mtrain.cluster import script_job
        from mtrain.script.settings import PLAIN

        params["config"] = params.get("config") or PLAIN
        loaded = script_job.with_script(load_job(params), Path(script), arguments)
    else:
        loaded = load_job(params)
    prepared = submission.prepare(loaded)
    if params.get("dry_run"):
        click.echo(prepared.request, nl=False)
        return
    for note in loaded.notes:
        click.echo(note, err=True)
    job = submission.submit(prepared)
    click.echo(f"submitted job {job.id} to {job.cluster}: run {job.name}")
    click.echo(f"request: {job.request}")
    click.echo(f"next: mtrain status {job.id} | mtrain logs -f {job.id} | mtrain cancel {job.id}")
