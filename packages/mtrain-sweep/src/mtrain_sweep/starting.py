"""From what a user asks for to a sweep that can run: a new one, or one that goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import SpecError, UsageError
from mtrain.spec import remedies
from mtrain_sweep import definition as definitions
from mtrain_sweep.definition import DEFAULT_TRIALS, DEFINITION, Sampler, SweepDefinition
from mtrain_sweep.request import SweepRequest
from mtrain_sweep.space import distinct, read_over, read_space

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mtrain.spec.config import Loaded
    from mtrain_sweep.search import SweepPlan

RUNS = Path("runs")
MOST_TRIED = 100
"""Choices of a folder whose spec is made before anything starts; that of each trial is checked as well."""


def prepare(request: SweepRequest) -> "SweepPlan":
    """Check a request and return the plan for ``sweep.run``; a new sweep's folder is made, and nothing else.

    Raises:
        UsageError: something is wrong with it; nothing was started.
    """
    need_libraries()
    for name, number in (("trials", request.trials), ("jobs", request.jobs), ("max-failures", request.max_failures)):
        if number is not None and number < 1:
            raise UsageError(f"--{name} {number}: expected at least 1")
    begins = request.out is not None and request.space_is_named and not (request.out / DEFINITION).exists()
    # A sweep that was killed before its folder was written goes on by beginning.
    return _begun(request) if begins or not request.resume else _resume(request)


def need_libraries() -> None:
    """Refuse to work without the libraries of a sweep.

    Raises:
        UsageError: one is not installed.
    """
    remedies.require(("optuna",), what="a sweep", extra="mtrain-sweep")


def newest_folder() -> Path:
    """Return the folder below ``runs`` of the sweep that was begun last.

    Raises:
        UsageError: there is none.
    """
    # By time: names of sweeps need not sort by age.
    files = sorted(RUNS.glob(f"*/{DEFINITION}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UsageError(f"--resume: there is no sweep in {RUNS}; name its folder with --out FOLDER")
    return files[-1].parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A sweep as its folder describes it now."""

    folder: Path
    definition: SweepDefinition
    trials: "Sequence[FrozenTrial]"


def open_sweep(folder: Path | None) -> Opened:
    """Read the folder of a sweep, also while it runs; None: the newest one.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    need_libraries()
    from mtrain_sweep.journal import Journal

    folder = (folder or newest_folder()).absolute()
    definition = definitions.read(folder)
    journal = Journal(folder)
    try:
        return Opened(folder=folder, definition=definition, trials=journal.trials())
    finally:
        journal.close()


def _begun(request: SweepRequest) -> "SweepPlan":
    from mtrain_sweep import search as sweep

    loaded = request.load()
    definition = _definition(request, loaded)
    folder = (request.out or _next_folder(loaded)).absolute()
    if (folder / DEFINITION).exists():
        raise UsageError(
            f"--out {request.out}: holds a sweep already; go on with it by --resume, or name another folder"
        )
    if folder.exists() and (not folder.is_dir() or {file.name for file in folder.iterdir()} - definitions.FILES):
        raise UsageError(f"--out {request.out}: is not an empty folder; name another one")
    plan = _plan(request, definition, folder)
    sweep.refuse_what_cannot_work(plan)
    definitions.write(definition, folder)
    return plan


def _resume(request: SweepRequest) -> "SweepPlan":
    folder = (request.out or newest_folder()).absolute()
    definition = definitions.read(folder)
    if not Path(definition.folder).is_dir():
        raise UsageError(
            f"{folder}: the sweep was begun in {definition.folder}, which is no folder any more; make it again"
        )
    if Path(definition.folder).resolve() != Path.cwd().resolve():  # Programs import what lies in their current folder.
        raise UsageError(
            f"{folder}: the sweep was begun in {definition.folder}; go there with cd, if the folder is yours, and type the "
            "command again"
        )
    if request.named != request.space_is_named:
        raise UsageError(
            "--resume: give the spec and what is searched both, or neither; the folder of the sweep has them"
        )
    if changed := _changed_options(request, definition):
        raise UsageError(
            f"--resume: the sweep in {folder} was begun with other settings ({changed}); leave them as they were"
        )
    if request.named:  # The user has said the same: code that the spec names is the user's own.
        definition = definition.model_copy(update={"file": None})
    else:
        _refuse_code(definition)
    if request.trials is not None and request.trials != definition.trials:
        definition = definition.model_copy(update={"trials": _trials(request, definition)})
        definitions.write(definition, folder)
    return _plan(request, definition, folder)


def _refuse_code(definition: SweepDefinition) -> None:
    """Refuse a sweep whose folder alone names code, in the spec or in what is searched, before anything is started.

    Raises:
        SpecError: it does, or its values are not valid.
    """
    extremes = {one.name: one.extremes() for one in definition.parameters}
    try:
        for i in range(min(MOST_TRIED, max(map(len, extremes.values()), default=0))):
            definition.trial_spec({name: values[min(i, len(values) - 1)] for name, values in extremes.items()})
    except SpecError as error:
        remedy = "type the command with which the sweep was begun, with its spec and what is searched, and add --resume"
        raise SpecError([*error.problems, f"{definition.file}: {remedy}"]) from error


def _trials(request: SweepRequest, definition: SweepDefinition) -> int:
    """Return the number of trials in all: a grid has no more than its points."""
    if definition.sampler == "grid":
        return min(request.trials or definition.grid_size, definition.grid_size)
    return request.trials or DEFAULT_TRIALS


def _changed_options(request: SweepRequest, definition: SweepDefinition) -> str:
    """Return in words what the user asks for that the sweep was not begun with; what is not said stays as it was."""
    if request.named and request.space_is_named:
        return definitions.difference(definition, _definition(request, request.load(), former=definition))
    for name in ("sampler", "pruner"):
        asked = getattr(request, name)
        if asked is not None and asked != getattr(definition, name):
            return f"{name}: {getattr(definition, name)} before, {asked} now"
    if request.metric is not None and definitions.parsed_metric(request.metric) != (
        definition.metric,
        definition.direction,
    ):
        return f"metric: {definition.metric} before, {request.metric} now"
    return ""


def _definition(request: SweepRequest, loaded: "Loaded", *, former: SweepDefinition | None = None) -> SweepDefinition:
    metric, direction = definitions.parsed_metric(request.metric or "score")
    if former is not None and request.metric is None:
        metric, direction = former.metric, former.direction
    searched = [] if request.space is None else read_space(request.space)
    parameters = definitions.fit_space(distinct([*searched, *read_over(request.over)]), loaded)
    default: Sampler = "tpe" if searched else "grid"
    definition = SweepDefinition(
        sampler=request.sampler or (former.sampler if former else default),
        pruner=request.pruner or (former.pruner if former else "none"),
        metric=metric,
        direction=direction,
        seed=loaded.spec.train.seed,
        trials=request.trials or DEFAULT_TRIALS,
        parameters=parameters,
        folder=str(Path.cwd()),
        base=dict(loaded.values),
    )
    if definition.sampler == "grid" and definition.grid_size > 10_000:
        raise UsageError(f"the grid has {definition.grid_size} points; search fewer values, or take another --sampler")
    return definition.model_copy(update={"trials": _trials(request, definition)})


def _plan(request: SweepRequest, definition: SweepDefinition, folder: Path) -> "SweepPlan":
    from mtrain.system import environment
    from mtrain_sweep.gpus import shares
    from mtrain_sweep.search import SweepPlan

    queued = _is_queued(definition)
    several = bool(definition.base["cluster"].get("ips"))
    if several and not queued and request.jobs > 1:
        request.tell(
            f"--jobs {request.jobs}: trials on several hosts run on the same GPUs, which are divided on one host only"
        )
    gpus = () if queued or several else shares(definition, jobs=request.jobs, environ=environment.caller())
    return SweepPlan(request=request, definition=definition, folder=folder, queued=queued, gpus=gpus)


def _is_queued(definition: SweepDefinition) -> bool:
    """Return whether trials go to the queue of a scheduler: the spec names one, and this process is no job of it."""
    from mtrain.jobs.hosts import allocation
    from mtrain.spec import config
    from mtrain.spec.resolved import AUTO
    from mtrain.system import environment

    loaded = config.load(definition.base, environ={}, folder_file=definition.file)
    if (
        loaded.spec.cluster.name == AUTO
        or allocation.job_id(environment.caller(), registry=loaded.registry) is not None
    ):
        return False
    cluster = loaded.job.cluster
    return cluster is not None and cluster.queue() is not None


def _next_folder(loaded: "Loaded") -> Path:
    from mtrain.jobs.place import run_name
    from mtrain.system import runfolder

    return runfolder.next_name(Path(loaded.spec.report.dir), f"{run_name(loaded)}-sweep")
