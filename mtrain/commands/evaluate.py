"""``mtrain evaluate``: score trained weights on the evaluation split, by the ranks of a job, or of an exported model in this process."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, evaluation_options, named_run, run_argument, take_request
from mtrain.errors import UsageError
from mtrain.spec import terminal
from mtrain.spec.request import SpecRequest

if TYPE_CHECKING:
    from mtrain.jobs.job import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest:
    """A request to score trained weights on the evaluation split."""

    spec: SpecRequest
    """The spec; none named: that of the run or checkpoint, else the newest run of the default spec is scored."""
    run: str | None = None
    """A run folder, whose best checkpoint is scored."""
    checkpoint: str | None = None
    """A checkpoint; with ``run``, in place of its best."""
    weights: str | None = None
    """A file of weights, or an exported ``.onnx``, in place of a checkpoint."""
    resume: str | None = None
    """A run folder, whose newest checkpoint is scored, or a checkpoint."""
    quiet: bool = False


@click.command(
    "evaluate",
    cls=JobCommand,
    examples=(
        ("mtrain evaluate runs/digits", "the best checkpoint of a run"),
        ("mtrain evaluate -c yolov5s --weights yolov5s.pt", "weights of the original project"),
    ),
)
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
    outcome = score(take_request(EvaluateRequest, params, run=named_run(params)))
    for line in outcome.lines:
        terminal.say(line)
    context.exit(outcome.code)


def score(request: EvaluateRequest) -> "Outcome":
    """Score weights on the evaluation split, in a run folder of its own.

    Raises:
        UsageError: there is nothing to evaluate, or the job cannot be started.
    """
    from mtrain.core.checkpoint import store

    with store.holding():
        return _score(request)


def _score(request: EvaluateRequest) -> "Outcome":
    from mtrain.jobs import exported, job
    from mtrain.jobs.hosts import allocated_hosts
    from mtrain.jobs.plan import means
    from mtrain.jobs.resume import compare, find, load
    from mtrain.jobs.resume.fetch import TrainedWeights
    from mtrain.jobs.run import closing
    from mtrain.weights.own import refuse_own

    named = TrainedWeights(
        run=request.run or request.resume, checkpoint=request.checkpoint, weights=request.weights
    ).fetch()
    source = named.checkpoint or named.run
    if source:
        refuse_own(Path(source), "evaluate: scores the networks of specs; use session.evaluate", kinds=("script",))
    # Weights belong to a network and its data, so without -c the spec is that of the run or of the exported file.
    config = exported.config_of(load.find_spec(request.spec.config, source), named.weights)
    loaded = allocated_hosts.complete(request.spec.read(config, _weights_value(named.weights)))
    if request.run and not named.checkpoint:
        folder = Path(str(named.run))
        if not folder.is_dir() and not means.joins(loaded):  # of a host that joins, the first one has the run
            raise UsageError(f"{folder}: no such run folder; give one such as runs/digits")
        source = str(find.best_of(folder) or source)
    # A spec beside a run may describe another network or other data than was trained, which a score does not show.
    is_beside = source and request.spec.config is not None
    if is_beside and (note := compare.note_on(loaded, Path(str(source)))):
        loaded = replace(loaded, notes=(*loaded.notes, note))
    weights = loaded.spec.model.weights
    if not exported.is_exported(weights):
        return job.evaluate(loaded, resume=source, quiet=request.quiet)
    # An exported model runs in this process: no rank and no framework is needed.
    if source is not None:
        raise UsageError(f"{source} and --weights {weights} are both given; keep one")
    file = Path(str(weights))
    folder, summary = exported.reader_of(file).evaluate(loaded, file, quiet=request.quiet)
    lines = closing.metric_lines(summary, summary.get("metrics", {}))
    return job.Outcome(code=0, run_dir=folder, summary=summary, lines=lines)


def _weights_value(weights: str | None) -> dict[str, Any]:
    """Return the value of the spec for a file of weights; an empty name stands for no file."""
    from mtrain.spec.config import Given

    return {} if weights is None else {"model.weights": Given(weights or None, f"--weights {shlex.quote(weights)}")}
