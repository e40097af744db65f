"""``mtrain prune``: make a smaller network of a trained one, and write its spec and weights into a folder."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, named_run, run_argument, spec_options, take_request, values_and_output
from mtrain.errors import CheckpointError, UsageError
from mtrain.spec import terminal
from mtrain.spec.request import SpecRequest
from mtrain_deploy.pruning import REQUEST, RESULT, WEIGHTS, By

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source

WORK_FOLDER = ".run"
SPEC, REPORT = "spec.yml", "pruned.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest:
    """A request for a smaller network."""

    target: float
    """Share of the FLOPs that is to be left, above 0 and at most 1."""
    out: str
    spec: SpecRequest = field(default_factory=SpecRequest)
    """The spec; none named: that of the run."""
    run: str | None = None
    """A run folder: its spec and its best checkpoint."""
    checkpoint: str | None = None
    weights: str | None = None
    """A file of weights in place of a checkpoint."""
    by: By = "l1"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of a request."""

    code: int
    """Exit code of the rank; nothing was written where it is not 0."""
    out: Path
    report: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``pruned.json``."""

    def lines(self) -> Iterator[str]:
        """Yield lines for a person: what was cut, before and after, and the files."""
        from mtrain_deploy.pruning import tables

        yield from tables.lines(self.report)
        yield f"written: {self.out / SPEC}, {self.out / WEIGHTS}"


@click.command(
    "prune",
    cls=JobCommand,
    examples=(("mtrain prune runs/digits --target 0.5 --out small", "a network of half the FLOPs"),),
)
@spec_options
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option("--weights", metavar="FILE", help="A file of weights; needs -c.")
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True),
    required=True,
    help="Share of the FLOPs that is to be left, such as 0.5.",
)
@click.option(
    "--by",
    type=click.Choice(["bn", "l1", "taylor"]),
    default="l1",
    show_default=True,
    help="What makes a channel important: the scale of its BatchNorm, its filter's size, or weight times gradient.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.option(
    "--out", "--output", "out", metavar="FOLDER", help="New folder for spec.yml and the weights; `-o FOLDER` too."
)
@click.pass_context
def prune(context: click.Context, /, **params: Any) -> None:
    """Remove the least important channels of a trained model; write a smaller network that trains like any other.

    RUN is a run folder: its spec and its best checkpoint.
    """
    params["overrides"], out = values_and_output(params["overrides"], params["out"])
    if out is None:
        raise click.UsageError("no folder to write: give -o FOLDER")
    result = prune_network(take_request(PruneRequest, params, run=named_run(params), out=out))
    if result.code == 0:
        for line in result.lines():
            terminal.say(line)
    context.exit(result.code)


def prune_network(request: PruneRequest) -> Pruned:
    """Prune a trained network; see ``docs/pruning.md`` for what is written.

    Raises:
        CheckpointError: there are no weights to use.
        UsageError: the spec, the output folder or the request is wrong.
    """
    from mtrain.core.checkpoint import store

    with store.holding():
        return _prune(request)


def _prune(request: PruneRequest) -> Pruned:
    from mtrain.core.record_files import write_json
    from mtrain.jobs.resume import compare

    weights, source = _weights(request)
    loaded = request.spec.read(source)
    if request.spec.config is not None:
        compare.say(loaded, weights)
    if not loaded.spec.evaluate.enabled:
        raise UsageError("evaluate.enabled: false given, but pruning compares scores; expected true")
    one_rank = request.spec.read(source, _one_rank(loaded, request))
    out = _empty(Path(request.out))
    work = out / WORK_FOLDER
    try:
        work.mkdir(mode=0o700, parents=True)
        write_json(work / REQUEST, {"target": request.target, "by": request.by})
    except OSError as error:
        raise UsageError(f"-o {out}: cannot be written: {error.strerror or error}") from error
    try:
        code = _run(one_rank, work, weights)
        if code == 0:
            report = json.loads((work / RESULT).read_text(encoding="utf-8"))
            _write(out, loaded, report)
            return Pruned(code=0, out=out, report=report)
        return Pruned(code=code, out=out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not any(out.iterdir()):
            out.rmdir()


def _weights(request: PruneRequest) -> tuple[Path, "Source"]:
    """Return the weights to prune, and the spec of their model."""
    from mtrain.jobs.resume import find, load
    from mtrain.weights.own import refuse_own

    if request.weights and (request.run or request.checkpoint):
        raise UsageError("--weights is given together with --run or --checkpoint; keep one")
    if not (request.run or request.checkpoint or request.weights):
        raise UsageError("nothing to prune: give --run FOLDER, --checkpoint PATH, or -c SPEC --weights FILE")
    found = find.find_weights("prune", run=request.run, checkpoint=request.checkpoint, weights=request.weights)
    if request.weights:
        return found.absolute(), request.spec.config
    if not found.is_dir():
        raise CheckpointError(
            f"--checkpoint {found}: is no folder; give that of a checkpoint, or a file with -c SPEC --weights FILE"
        )
    refuse_own(found, "prune: cuts the networks of model plugins")
    config = request.spec.config or load.find_spec(None, str(found))
    if config is None:
        raise UsageError(f"{found}: no spec.yml beside it; give the spec with -c")
    return found.absolute(), config


def _one_rank(loaded: "Loaded", request: PruneRequest) -> dict[str, Any]:
    """Return the values of a spec for one process on this host, on the framework of the run."""
    from mtrain.jobs.plan.solo import one_process

    return one_process(loaded.job.backend.framework, device=request.device) | {
        "report.reporters": {},
        "train.precision": "fp32",
        # The weights are averaged already, and must stay as they are while gradients are taken.
        "train.ema": None,
        "train.prune": None,
        "train.compile": False,
        "train.freeze": [],
    }


def _empty(out: Path) -> Path:
    """Return the folder of the results, which must not hold anything yet.

    Raises:
        UsageError: it is not empty, or no folder.
    """
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"-o {out}: exists already and is not an empty folder; give another one")
    return out


def _run(loaded: "Loaded", work: Path, weights: Path) -> int:
    """Run the rank that prunes, and return its exit code; a failure was printed."""
    from mtrain.jobs.hosts.this_host import ThisHost
    from mtrain.jobs.plan.plan import make_plan
    from mtrain.jobs.run.request_files import write_folder
    from mtrain.records.console import Notes
    from mtrain.system import environment, job_secret

    plan = make_plan(loaded, run_dir=work.absolute(), resume=weights, mode="mtrain_deploy.pruning.worker")
    write_folder(loaded, plan)
    hosts = ThisHost(
        display=Notes(sys.stderr),
        environ=environment.clean(environment.caller()) | job_secret.draw_secret(),
        replan=lambda _: plan,
        stream=sys.stderr,
    )
    return hosts.run(plan).code


def _write(out: Path, loaded: "Loaded", report: Mapping[str, Any]) -> None:
    """Write the spec of the smaller network beside its weights, and the report."""
    from mtrain.core.record_files import write_json
    from mtrain.spec import outputs
    from mtrain.spec.yaml_reader import dump

    weights = out / WEIGHTS
    (out / WORK_FOLDER / WEIGHTS).replace(weights)
    # A deep copy: the values of the spec that was read must not change.
    values = json.loads(json.dumps(dict(loaded.values)))
    start = {"weights": str(weights.absolute()), "weights_key": None}
    values["model"] = {**values.get("model", {}), **start, "pruned": report["sizes"]}
    outputs.write_text(out / SPEC, dump(values, inline=True))
    write_json(out / REPORT, dict(report))
