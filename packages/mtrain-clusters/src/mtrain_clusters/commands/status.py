"""``mtrain status``: the state of a job that was given to a scheduler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal
from mtrain.spec.hostnames import few

F = TypeVar("F", bound=Callable[..., Any])


def job_argument(command: F) -> F:
    """Add the job's id, and the folder of its record, to a command."""
    command = click.option(
        "--dir", "folder", default="runs", show_default=True, metavar="FOLDER", type=click.Path(path_type=Path),
        help="Folder of the runs: report.dir of the spec.",
    )(command)  # fmt: skip
    return click.argument("job", metavar="[ID]", required=False)(command)


@click.command(
    "status",
    cls=Command,
    examples=(("mtrain status", "of the newest job"), ("mtrain status --all", "every job that was submitted here")),
)
@job_argument
@click.option("--all", "every", is_flag=True, help="List all jobs that were submitted, without asking the scheduler.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(job: str | None, folder: Path, *, every: bool, as_json: bool) -> None:
    """Show the state of a submitted job, and the hosts that take part; without ID, of the newest one."""
    from mtrain_clusters import queued_job, submission

    if every:
        for line in submission.summary_lines(submission.jobs(folder)):
            terminal.say(line)
        return
    submitted = queued_job.find(folder, job)
    queued, state, progress = submitted.job, submitted.state(), submitted.progress()
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
        terminal.say(json.dumps(fields, indent=2))
        return
    code = "" if state.code is None else f", exit code {state.code}"
    hosts = f" on {few(state.hosts)}" if state.hosts else ""
    terminal.say(f"job {queued.id} ({queued.cluster}), run {queued.name}: {state.phase}{hosts} [{state.text}{code}]")
    for line in queued_job.progress_lines(progress, is_running=state.phase == "running"):
        terminal.say(line)
