"""The job of each backend of a comparison: its spec or script, and the checks before anything starts."""

import io
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.compare.request import CompareRequest, Variant
from mtrain.compare.results import BackendRow
from mtrain.core.record_files import write_json
from mtrain.core.update.recipe import make_recipe
from mtrain.errors import LaunchError, MtrainError, SpecError, UsageError
from mtrain.jobs.hosts import this_host
from mtrain.jobs.plan import elastic
from mtrain.jobs.plan.plan import make_plan
from mtrain.jobs.run import script_job
from mtrain.rank.script.settings import PLAIN
from mtrain.records.history import History
from mtrain.spec import config
from mtrain.spec.trial import Trial
from mtrain.system import runfolder
from mtrain.system.runfolder import RunFolder
from mtrain_trace.reading import Trace

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded
    from mtrain.spec.model import Spec

ENDED = (130, 143)
"""Exit codes of a job that was asked to end from outside."""
ALONE = "none"
"""Rendezvous of a backend that trains in one process."""


@dataclass(kw_only=True)
class Bench:
    """A variant with its spec and the results of its jobs so far."""

    variant: Variant
    loaded: "Loaded"
    spec: "Spec"
    """The spec of the job; of a script, once the traced job is done, with what the script itself has set."""
    ranks: int
    notes: list[str]
    row: BackendRow | None = None
    traced: History | None = None
    started: float = 0.0
    timed: list[tuple[History, float]] = field(default_factory=list)
    rounds: tuple[Path, ...] = ()
    """Folders of the timed trainings that the traced job does first."""
    repeats: bool | None = None

    @property
    def trace(self) -> Trace | None:
        """What the traced job has left; None: it was not run, or failed."""
        return None if self.row is None else self.row.trace

    @property
    def precision(self) -> str:
        """Precision of the job: what its ranks have chosen for ``auto``, where it has run."""
        start = {} if self.traced is None else self.traced.start
        return str(start.get("precision", self.spec.train.precision))


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedJob:
    """A job that has ended."""

    code: int
    """Its exit code."""
    reason: str
    """Why it failed, in one line; empty if it did not."""
    folder: RunFolder


class ComparisonEnded(MtrainError):
    """A job was asked to end from outside, and the comparison ends with it."""

    def __init__(self, code: int) -> None:
        super().__init__("ended from outside; nothing was compared")
        self.exit_code = code


def run_job(request: CompareRequest, loaded: "Loaded", name: str, *, rounds: Sequence[Path] = ()) -> EndedJob:
    """Run one job to its end, without showing its messages. It trains into each folder of ``rounds`` first.

    Raises:
        ComparisonEnded: the job was asked to end.
    """
    folder = runfolder.create(request.folder, name, latest=False)
    try:
        if rounds:
            write_json(folder / runfolder.ROUNDS, [str(path.absolute()) for path in rounds])
        mode = "compare" if rounds else "train"
        result = this_host.run_job(loaded, folder, mode=mode, quiet=True, stream=io.StringIO())
    except LaunchError as error:
        return EndedJob(code=error.exit_code, reason=str(error), folder=RunFolder(folder))
    if result.code in ENDED:
        raise ComparisonEnded(result.code)
    return EndedJob(code=result.code, reason=result.reason, folder=RunFolder(folder))


def repeats_in_one_start(request: CompareRequest, bench: Bench) -> bool:
    """Return whether the job of a backend can train several times: all that training changes can be put back."""
    # What a script, a user's own model and optimizer, and masks and ranges that training makes have changed cannot.
    train = bench.spec.train
    if request.apart or bench.loaded.script is not None or train.prune is not None or train.quantise is not None:
        return False
    return not bench.loaded.job.model_class.native


def _length(request: CompareRequest) -> dict[str, Any]:
    """Return the settings for the length of a spec's jobs. Scripts have a ``Trial`` instead, as they set their own."""
    return {"train.updates": request.updates, "train.epochs": None}


def _common(request: CompareRequest) -> dict[str, Any]:
    """Return the other settings of every job of a comparison: its own logs, no evaluation, one checkpoint at the end."""
    return {
        "cluster.nproc_per_node": request.ranks,
        "cluster.ips": [],
        # A restart would hide that a backend fails.
        "cluster.max_restarts": 0,
        "cluster.log_dir": None,
        "evaluate.every_epochs": None,
        "evaluate.every_updates": None,
        "evaluate.at_end": False,
        "checkpoint.every_epochs": None,
        "checkpoint.every_updates": None,
        "checkpoint.every_minutes": None,
        "report.dir": str(request.folder),
        # Each update is compared.
        "report.every_updates": 1,
        "report.tensorboard": False,
        "report.plots": False,
        "report.trace": "state",
    }


def bench_of(request: CompareRequest, variant: Variant) -> Bench:
    """Return the job of one backend.

    Raises:
        UsageError: the spec, the script or the options of the backend are wrong.
    """
    loaded = _load(request, variant)
    registry = loaded.registry
    plugin = registry.load("backends", variant.name)
    spec_backend = loaded.spec.backend
    # Another backend takes those options of the spec that it has, too.
    shared_options = {
        key: value
        for key, value in spec_backend.options.items()
        if spec_backend.name == variant.name or key in plugin.Options.model_fields
    }
    options = {**shared_options, **variant.options}
    backend = registry.make("backends", variant.name, options, path=f"--backends {variant.label}")
    values = deepcopy(dict(loaded.values))
    values["backend"] |= {"name": variant.name, "options": options}
    notes, ranks = [], request.ranks
    dropped = sorted(spec_backend.options.keys() - options.keys())
    if dropped:
        notes.append(f"backend.options of the spec that it does not have: {', '.join(dropped)}")
    row = None
    alone = backend.rendezvous == ALONE and request.ranks > 1
    if alone:
        ranks, values["cluster"]["nproc_per_node"] = 1, 1
    parallel = loaded.spec.parallel
    if alone or parallel.tensor * parallel.pipeline > 1:
        shards = loaded.spec.cluster.shards or request.ranks
        values["cluster"] |= {"shards": shards, "sharing": elastic.PASSES}
        row = _impossible_in_turn(loaded, variant, ranks=request.ranks)
        who = "one rank" if alone else "tensor groups" if parallel.pipeline == 1 else "pipelines"
        notes.append(
            f"{who}, with {shards} shards of each micro batch in turn: the same ones as on {request.ranks} ranks"
        )
    loaded = with_values(loaded, values)
    return Bench(variant=variant, loaded=loaded, spec=loaded.spec, ranks=ranks, notes=notes, row=row)


def _impossible_in_turn(loaded: "Loaded", variant: Variant, *, ranks: int) -> BackendRow | None:
    """Return the row of a job that one rank cannot compute shard after shard; None if it can."""
    # Shard after shard is how one rank computes what `ranks` compute: the first shard of each micro batch moves running
    # statistics, as on rank 0 of several. A loss or statistics of all shards at the same time cannot be had so.
    # What a script's own code needs of all shards shows when it runs.
    spans_ranks = loaded.script is None and bool(loaded.job.model_class.spans_ranks)
    sync_batchnorm, model = loaded.spec.train.sync_batchnorm, loaded.spec.model.name
    reasons = elastic.needs_all_shards(sync_batchnorm=sync_batchnorm, model=model, spans_ranks=spans_ranks)
    if not reasons:
        return None
    return BackendRow(
        label=variant.label,
        outcome="refused",
        reason=f"one process cannot compute what {ranks} ranks compute, so there is nothing to compare ({reasons[0]}); "
        f"compare without {variant.name}, or with --ranks 1",
    )


def _load(request: CompareRequest, variant: Variant) -> "Loaded":
    """Read the spec, or what a script's job has of one, with the overrides of this backend.

    Raises:
        UsageError: it cannot be read, or an override sets what a comparison sets.
    """
    common, length = _common(request), _length(request)
    for setting in variant.overrides:
        path, value = setting.split("=", 1)
        if path in common or path in length or path == "backend.name":
            raise UsageError(f"--backends {variant.label}: {path}={value} given, but a comparison sets {path} itself")
    values = common if request.script is not None else length | common
    flags = {path: config.Given(value, f"compare: {path}={value}") for path, value in values.items()}
    overrides = [*request.overrides, *variant.overrides]
    if request.script is None:
        return config.load(request.config, overrides=overrides, flags=flags)
    loaded = config.load(request.config or PLAIN, overrides=overrides, flags=flags)
    return on_trial(script_job.with_script(loaded, request.script, request.arguments), updates=request.updates)


def on_trial(loaded: "Loaded", **changes: Any) -> "Loaded":
    """Return a script's job with changes to its ``Trial``."""
    script = loaded.script
    assert script is not None
    trial = Trial(**changes) if script.trial is None else replace(script.trial, **changes)
    return replace(loaded, script=replace(script, trial=trial))


def with_values(loaded: "Loaded", values: Mapping[str, Any]) -> "Loaded":
    """Return ``loaded`` with all values of its spec replaced."""
    spec = config.from_json(json.dumps(values), name="compare")
    return replace(loaded, spec=spec, values=spec.model_dump(mode="json"))


def preflight(request: CompareRequest, benches: Sequence[Bench]) -> None:
    """Check each backend's requirements and make its plan; check the data once, on the first backend that can run.

    A backend that is not installed or refuses the job gets its row at once, and the others are compared.

    Raises:
        UsageError: fewer than two backends are left to compare; the reason of the first that is not.
    """
    from mtrain.jobs.preflight import job_checks as checks
    from mtrain.system import interpreter

    data_checked = False
    refusals: list[UsageError] = []
    for bench in benches:
        spec = bench.loaded.spec
        if bench.row is not None:
            refusals.append(UsageError(bench.row.reason))
            request.tell(f"{bench.variant.label}: refused: {bench.row.reason}")
            continue
        if bench.loaded.script is None:
            make_recipe(spec, size=bench.ranks)
        try:
            interpreter.check(bench.loaded.job)
        except SpecError:
            raise  # it would be wrong for every backend
        except UsageError as error:
            refusals.append(error)
            bench.row = BackendRow(label=bench.variant.label, outcome="absent", reason=str(error).rstrip("; "))
            request.tell(f"{bench.variant.label}: not installed")
            continue
        try:
            make_plan(bench.loaded, run_dir=request.folder / bench.variant.folder)
        except UsageError as error:
            refusals.append(error)
            bench.row = BackendRow(label=bench.variant.label, outcome="refused", reason=str(error))
            request.tell(f"{bench.variant.label}: refused: {error}")
            continue
        # The data are the same for all, and reading them may take long.
        if not data_checked:
            if bench.loaded.script is not None:
                checks.check_script(bench.loaded.job)
            else:
                for note in checks.check(bench.loaded.job, size=bench.ranks):
                    request.tell(note)
            data_checked = True
    if refusals and sum(bench.row is None for bench in benches) < 2:
        raise refusals[0]
