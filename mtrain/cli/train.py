"""``mtrain train``: check, plan, start and watch a training job."""

from typing import Any

import click

from mtrain.cli.options import JobCommand, job_options, load_job


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.cluster import job, start

    resume = start.latest_run(params.get("config"), params.get("resume"))
    params["config"] = start.resumed_config(params.get("config"), resume)
    loaded = load_job(params)
    if params.get("dry_run"):
        click.echo(start.planned(loaded, start.locate(loaded, resume=resume)).text(), nl=False)
        return
    start.refuse_copies(loaded, nnodes=params.get("nnodes"))
    outcome = job.train(loaded, resume=resume)
    for line in outcome.lines:
        click.echo(line)
    context.exit(outcome.code)
