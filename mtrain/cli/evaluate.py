"""``mtrain evaluate``: score trained weights on the evaluation split, over all ranks."""

from pathlib import Path
from typing import Any

import click

from mtrain.cli.options import JobCommand, evaluation_options, load_job


@click.command("evaluate", cls=JobCommand)
@evaluation_options
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint; with --run in its place.")
@click.option("--weights", metavar="FILE", help="A file of weights, or an exported .onnx, instead of a checkpoint.")
@click.option("-r", "--resume", metavar="PATH", hidden=True, help="As --run or --checkpoint.")
@click.pass_context
def evaluate(context: click.Context, /, **params: Any) -> None:
    """Score the averaged weights of a checkpoint; without --run or -c, those of the newest run of the spec here."""
    from mtrain.cluster import allocated_hosts, exported_model, job, many_hosts, start

    named = start.TrainedWeights(
        run=params["run"] or params["resume"], checkpoint=params["checkpoint"], weights=params["weights"]
    ).fetched()
    if params["run"]:
        params["run"] = named.run
    else:
        params["resume"] = named.run
    params |= {"checkpoint": named.checkpoint, "weights": named.weights}
    requested = params["checkpoint"] or params["run"] or params["resume"]
    params["config"] = start.resumed_config(params["config"], requested)
    params["config"] = exported_model.config_of(params["config"], params["weights"])
    loaded = allocated_hosts.completed(load_job(params))
    missing = params["run"] and not params["checkpoint"] and not Path(params["run"]).is_dir()
    if missing and not many_hosts.joins(loaded):
        raise click.UsageError(f"--run {params['run']}: no such run folder; give one such as runs/digits")
    best = None if params["checkpoint"] or not params["run"] else start.best_of(Path(params["run"]))
    outcome = job.evaluate(loaded, resume=str(best) if best else requested)
    for line in outcome.lines:
        click.echo(line)
    context.exit(outcome.code)
