"""``mtrain cancel``: end a job that was given to a scheduler."""

from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal
from mtrain_clusters.commands.status import job_argument


@click.command("cancel", cls=Command, examples=(("mtrain cancel 4711", "ask job 4711 to save its state and end"),))
@job_argument
def command(job: str | None, folder: Path) -> None:
    """End a submitted job, which saves its state first; without ID, the newest one."""
    from mtrain_clusters import queued_job

    submitted = queued_job.find(folder, job)
    queued, state = submitted.job, submitted.state()
    if state.ended:
        terminal.say(f"job {queued.id} has ended already: {state.phase} [{state.text}]")
        return
    submitted.cancel()
    terminal.say(f"job {queued.id} ({queued.cluster}), run {queued.name}: asked to end")
    terminal.say(f"to go on with it later, submit the same again with --name {queued.name}")
