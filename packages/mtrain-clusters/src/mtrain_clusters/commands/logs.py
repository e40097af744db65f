"""``mtrain logs``: what a job that was given to a scheduler has printed."""

from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal
from mtrain_clusters.commands.status import job_argument


@click.command("logs", cls=Command, examples=(("mtrain logs --follow", "of the newest job, until it ends"),))
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also show the lines to come, until the job ends.")
def command(job: str | None, folder: Path, *, follow: bool) -> None:
    """Show what a submitted job has printed; without ID, the newest one."""
    from mtrain_clusters import queued_job

    for line in queued_job.find(folder, job).logs(follow=follow):
        terminal.say(line)
