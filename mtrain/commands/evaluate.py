"""``mtrain evaluate``: score trained weights on the evaluation split, over all ranks."""

from typing import Any

import click

from mtrain.commands.options import JobCommand, evaluation_options, named_run, run_argument, spec_request
from mtrain.spec import terminal


@click.command("evaluate", cls=JobCommand)
@evaluation_options
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint; in place of the best of RUN.")
@click.option("--weights", metavar="FILE", help="A file of weights, or an exported .onnx, instead of a checkpoint.")
@click.option("-r", "--resume", metavar="PATH", hidden=True, help="As --run or --checkpoint.")
@click.pass_context
def evaluate(context: click.Context, /, **params: Any) -> None:
    """Score the averaged weights of a checkpoint on the evaluation split.

    RUN is a run folder: its spec and its best checkpoint. Without RUN and -c: the newest run of the spec here.
    """
    from mtrain.api.evaluation import EvaluateRequest
    from mtrain.api.evaluation import evaluate as score

    run = named_run(params)
    named = {name: params.pop(name) for name in ("checkpoint", "weights", "resume")}
    outcome = score(EvaluateRequest(run=run, spec=spec_request(params), **named))
    for line in outcome.lines:
        terminal.say(line)
    context.exit(outcome.code)
