"""``mtrain status``, ``mtrain logs`` and ``mtrain cancel``: jobs that were given to a scheduler."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mtrain.core.queue import Queue, QueuedJob

F = TypeVar("F", bound=Callable[..., Any])


def job_argument(command: F) -> F:
    """Add the job's id, and the folder of its record, to a command."""
    command = click.option(
        "--dir", "folder", default="runs", show_default=True, metavar="FOLDER", type=click.Path(path_type=Path),
        help="Folder of the runs: report.dir of the spec.",
    )(command)  # fmt: skip
    return click.argument("job", metavar="[ID]", required=False)(command)


def found(folder: Path, number: str | None) -> "tuple[QueuedJob, Queue]":
    """Return a submitted job, the newest where no id is given, and the queue it was given to."""
    from mtrain.cluster import submission

    job = submission.find(folder, number)
    return job, submission.queue_of_job(job)


@click.command()
@job_argument
@click.option("--all", "every", is_flag=True, help="List all jobs that were submitted, without asking the scheduler.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(job: str | None, folder: Path, *, every: bool, as_json: bool) -> None:
    """Show the state of a submitted job, and the hosts that take part; without ID, of the newest one."""
    from mtrain.cluster import host_log, submission

    if every:
        for line in submission.summary_lines(submission.jobs(folder)):
            click.echo(line)
        return
    queued, queue = found(folder, job)
    state = queue.state(queued)
    progress = submission.progress(queued, folder)
    if as_json:
        import json

        fields = {
            "id": queued.id,
            "cluster": queued.cluster,
            "name": queued.name,
            "phase": state.phase,
            "state": state.text,
            "hosts": list(state.hosts),
            "code": state.code,
            **progress,
        }
        click.echo(json.dumps(fields, indent=2))
        return
    code = "" if state.code is None else f", exit code {state.code}"
    hosts = f" on {', '.join(state.hosts)}" if state.hosts else ""
    click.echo(f"job {queued.id} ({queued.cluster}), run {queued.name}: {state.phase}{hosts} [{state.text}{code}]")
    if progress:
        click.echo(
            f"update {progress['update']} of {progress['total_updates']}, run folder {progress['run_dir']}"
            if progress.get("total_updates")
            else f"run folder {progress['run_dir']}"
        )
        for line in host_log.words(progress["participants"]) if state.phase == "running" else ():
            click.echo(line)
        if progress["copied"]:
            from mtrain.report.wording import copy_words

            click.echo(f"newest copy: {copy_words(progress['copied'])}")


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also show the lines to come, until the job ends.")
def logs(job: str | None, folder: Path, *, follow: bool) -> None:
    """Show what a submitted job has printed; without ID, the newest one."""
    queued, queue = found(folder, job)
    for line in queue.logs(queued, follow=follow):
        click.echo(line)


@click.command()
@job_argument
def cancel(job: str | None, folder: Path) -> None:
    """End a submitted job, which saves its state first; without ID, the newest one."""
    queued, queue = found(folder, job)
    state = queue.state(queued)
    if state.ended:
        click.echo(f"job {queued.id} has ended already: {state.phase} [{state.text}]")
        return
    queue.cancel(queued)
    click.echo(f"job {queued.id} ({queued.cluster}), run {queued.name}: asked to end")
    click.echo(f"to go on with it later, submit the same again with --name {queued.name}")
