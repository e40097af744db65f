"""``mtrain prune``: make a smaller network of a trained one, and write its spec and weights into a folder."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.cluster import start, this_host
from mtrain.errors import CheckpointError, UsageError
from mtrain.pruning.scores import By
from mtrain.pruning.sensitivity import SAMPLES
from mtrain.pruning.worker import REQUEST, RESULT, WEIGHTS
from mtrain.report.console import Notes
from mtrain.report.reporter import write_json
from mtrain.system import environment, job_secret

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source

Load = Callable[["Source", Mapping[str, Any]], "Loaded"]
"""Load a spec from a config (None: the default one) with further values by dotted path."""
WORK_FOLDER = ".run"
SPEC, REPORT = "spec.yml", "pruned.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for a smaller network."""

    target: float
    """Share of the FLOPs that is to be left, above 0 and at most 1."""
    out: str
    config: "Source" = None
    run: str | None = None
    """A run folder: its spec and its best checkpoint."""
    checkpoint: str | None = None
    weights: str | None = None
    """A file of weights in place of a checkpoint."""
    by: By = "l1"
    sensitivity: bool = False
    samples: int = SAMPLES
    """Number of samples of the evaluation split that the sensitivity table scores."""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of a request."""

    code: int
    """Exit code of the rank; nothing was written where it is not 0."""
    out: Path
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Content of ``pruned.json``."""


def prune(request: Request, load: Load) -> Pruned:
    """Prune a trained network; see ``docs/pruning.md`` for what is written.

    Raises:
        CheckpointError: there are no weights to use.
        UsageError: the spec, the output folder or the request is wrong.
    """
    weights, source = _weights(request)
    loaded = load(source, {})
    if not loaded.spec.evaluate.enabled:
        raise UsageError("evaluate.enabled: false given, but pruning compares scores; expected true")
    one_rank = load(source, _one_rank(loaded, request))
    out = _empty(Path(request.out))
    work = out / WORK_FOLDER
    try:
        work.mkdir(mode=0o700, parents=True)
        asked = {
            "target": request.target,
            "by": request.by,
            "sensitivity": request.sensitivity,
            "samples": request.samples,
        }
        write_json(work / REQUEST, asked)
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


def _weights(request: Request) -> tuple[Path, "Source"]:
    """Return the weights to prune, and the spec of their model."""
    if request.weights and (request.run or request.checkpoint):
        raise UsageError("--weights is given together with --run or --checkpoint; keep one")
    if request.weights:
        if not Path(request.weights).exists():
            raise CheckpointError(f"--weights {request.weights}: no such file; give a file of weights")
        return Path(request.weights).absolute(), request.config
    if not (request.run or request.checkpoint):
        raise UsageError("nothing to prune: give --run FOLDER, --checkpoint PATH, or -c SPEC --weights FILE")
    run = Path(request.run or "")
    if request.run and not run.is_dir():
        raise UsageError(f"--run {request.run}: no such run folder; give one such as runs/digits")
    found = Path(request.checkpoint) if request.checkpoint else start.best_of(run)
    if found is None or not found.is_dir():
        where = f"--checkpoint {found}: no such checkpoint" if found else f"--run {run}: no intact checkpoint in it"
        raise CheckpointError(f"{where}; `mtrain checkpoint list FOLDER` shows those of a run")
    config = request.config or start.resumed_config(None, str(found))
    if config is None:
        raise UsageError(f"{found}: no spec.yml beside it; give the spec with -c")
    return found.absolute(), config


def _one_rank(loaded: "Loaded", request: Request) -> dict[str, Any]:
    """Return the values of a spec for one process on this host, on the framework of the run."""
    return start.one_process(start.framework_of(loaded), device=request.device) | {
        "report.reporters": {},
        "train.precision": "fp32",
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
    where = start.Where(run_dir=work.absolute(), checkpoint=weights)
    plan = start.planned(loaded, where, mode="prune")
    commands = [
        dataclasses.replace(
            command,
            argv=["mtrain.pruning.worker" if word == "mtrain.rank.worker" else word for word in command.argv],
        )
        for command in plan.commands
    ]
    plan = dataclasses.replace(plan, commands=commands, max_restarts=0)
    start.write_folder(loaded, plan)
    job = this_host.Job(
        display=Notes(sys.stderr),
        environ=environment.cleaned(environment.caller()) | job_secret.drawn(),
        replan=lambda _: plan,
        stream=sys.stderr,
    )
    return this_host.run(plan, job).code


def _write(out: Path, loaded: "Loaded", report: Mapping[str, Any]) -> None:
    """Write the spec of the smaller network beside its weights, and the report."""
    from mtrain.spec.yaml_reader import dumped

    weights = out / WEIGHTS
    (out / WORK_FOLDER / WEIGHTS).replace(weights)
    values = json.loads(json.dumps(dict(loaded.values)))
    values["model"] = {**values.get("model", {}), "weights": str(weights.absolute()), "pruned": report["sizes"]}
    (out / SPEC).write_text(dumped(values, inline=True), encoding="utf-8")
    write_json(out / REPORT, dict(report))
