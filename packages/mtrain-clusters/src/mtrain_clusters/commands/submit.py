"""``mtrain submit``: give a job to the queue of a scheduler, such as Slurm or Kubernetes."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mtrain.commands.options import job_options, spec_request
from mtrain.commands.run import ScriptCommand
from mtrain.spec import terminal

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
    from mtrain.commands.training_request import TrainRequest
    from mtrain_clusters import queue

    job = TrainRequest(
        spec=spec_request(with_queue_flags(params)),
        resume=params["resume"],
        any_name=True,
        script=None if script is None else Path(script),
        arguments=arguments,
    )
    request = queue.SubmitRequest(job=job, name=params["name"])
    if params["dry_run"]:
        terminal.say(queue.request_text(request), nl=False)
        return
    submitted = queue.submit(request, tell=lambda note: terminal.say(note, err=True)).job
    terminal.say(f"submitted job {submitted.id} to {submitted.cluster}: run {submitted.name}")
    terminal.say(f"request: {submitted.request}")
    terminal.say(f"next: mtrain status {submitted.id} | mtrain logs -f {submitted.id} | mtrain cancel {submitted.id}")
