"""``mtrain train``: check, plan, start and watch a training job."""

from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, job_options, spec_request
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain.api.training import TrainRequest


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.api.training import TrainRequest

    request = TrainRequest(spec=spec_request(params), resume=params["resume"], any_name=True)
    context.exit(train_job(request, dry_run=params["dry_run"]))


def train_job(request: "TrainRequest", *, dry_run: bool) -> int:
    """Train and print the result, or print the plan; return the exit code."""
    from mtrain.api import planning, training

    if dry_run:
        plan = planning.plan(request, tell=lambda note: terminal.say(note, err=True))
        terminal.say(plan.text(), nl=False)
        return 0
    return training.train(request, tell=terminal.say).code
