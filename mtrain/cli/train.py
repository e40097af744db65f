"""``mtrain train``: check, plan, start and watch a training job."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, job_options, load_job

if TYPE_CHECKING:
    from mtrain.cluster.job import Outcome
    from mtrain.spec.config import Loaded


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.cluster import start

    resume = start.latest_run(params.get("config"), params.get("resume"))
    params["config"] = start.resumed_config(params.get("config"), resume)
    train_job(context, load_job(params), resume=resume, params=params)


def train_job(context: click.Context, loaded: "Loaded", *, resume: str | None, params: Mapping[str, Any]) -> None:
    """Train as a command of the terminal does: show the plan with ``--dry-run``, else train and exit with the result."""
    from mtrain.cluster import allocated_hosts, job, start

    loaded = allocated_hosts.completed(loaded)
    if params.get("dry_run"):
        for note in loaded.notes:
            click.echo(note, err=True)
        click.echo(start.planned(loaded, start.locate(loaded, resume=resume)).text(), nl=False)
        return
    outcome = job.train(loaded, resume=resume)
    for line in outcome.lines:
        click.echo(line)
    if loaded.spec.report.plots:
        _write_report(outcome)
    context.exit(outcome.code)


def _write_report(outcome: "Outcome") -> None:
    from mtrain.pages.report import write_after

    path = write_after(outcome.run_dir, code=outcome.code, warn=lambda text: click.echo(text, err=True))
    if path is not None:
        click.echo(f"report:      {path}")
