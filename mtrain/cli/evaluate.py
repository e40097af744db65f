"""``mtrain evaluate``: score trained weights on the evaluation split, over all ranks."""

from typing import Any

import click

from mtrain.cli.options import JobCommand, evaluation_options, spec_request
from mtrain.spec import terminal


@click.command("evaluate", cls=JobCommand)
@evaluation_options
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint; with --run in its place.")
@click.option("--weights", metavar="FILE", help="A file of weights, or an exported .onnx, instead of a checkpoint.")
@click.option("-r", "--resume", metavar="PATH", hidden=True, help="As --run or --checkpoint.")
@click.pass_context
def evaluate(context: click.Context, /, **params: Any) -> None:
    """Score the averaged weights of a checkpoint; without --run or -c, those of the newest run of the spec here."""
    from mtrain.api.evaluation import EvaluateRequest
    from mtrain.api.evaluation import evaluate as score

    named = {name: params.pop(name) for name in ("run", "checkpoint", "weights", "resume")}
    outcome = score(EvaluateRequest(spec=spec_request(params), **named))
    for line in outcome.lines:
        terminal.say(line)
    context.exit(outcome.code)
