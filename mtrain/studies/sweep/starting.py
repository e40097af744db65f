"""From what a user asks for to a sweep that can run: a new one, or one that goes on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.studies.sweep import request as requests
from mtrain.studies.sweep.request import DEFAULT_TRIALS, REQUEST, Pruner, Request, Sampler
from mtrain.studies.sweep.space import distinct, read_over, read_space

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mtrain.spec.config import Loaded
    from mtrain.studies.sweep.sweep import Order

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A sweep as the user asks for it; None: not said."""

    load: Callable[[], "Loaded"]
    """Reads the spec; called only if a new sweep begins, or the spec was named."""
    named: bool = False
    """The user has named a spec or values of it."""
    space: str | Path | Mapping[str, Any] | None = None
    over: Sequence[str] = ()
    trials: int | None = None
    jobs: int = 1
    sampler: Sampler | None = None
    pruner: Pruner | None = None
    metric: str | None = None
    out: Path | None = None
    resume: bool = False
    max_failures: int = 3
    tell: Callable[[str], None] = print

    @property
    def space_is_named(self) -> bool:
        """Return whether the user has said what is searched."""
        return self.space is not None or bool(self.over)


def order_of(wish: Wish) -> "Order":
    """Check a wish and return the order for ``sweep.run``; a new sweep's folder is made, and nothing else.

    Raises:
        UsageError: something is wrong with it; nothing was started.
    """
    need_libraries()
    for name, number in (("trials", wish.trials), ("jobs", wish.jobs), ("max-failures", wish.max_failures)):
        if number is not None and number < 1:
            raise UsageError(f"--{name} {number}: expected at least 1")
    begins = wish.out is not None and wish.space_is_named and not (wish.out / REQUEST).exists()
    # A sweep that was killed before its folder was written goes on by beginning.
    return _begun(wish) if begins or not wish.resume else _resumed(wish)


def need_libraries() -> None:
    """Refuse to work without the libraries of the extra `sweep`.

    Raises:
        UsageError: one is not installed.
    """
    remedies.need(("optuna", "cmaes", "matplotlib"), what="a sweep", extra="sweep")


def newest_folder() -> Path:
    """Return the folder below ``runs`` of the sweep that was begun last.

    Raises:
        UsageError: there is none.
    """
    files = sorted(RUNS.glob(f"*/{REQUEST}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UsageError(f"--resume: there is no sweep in {RUNS}; name its folder with --out FOLDER")
    return files[-1].parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A sweep as its folder describes it now."""

    folder: Path
    request: Request
    trials: "Sequence[FrozenTrial]"


def opened(folder: Path | None) -> Opened:
    """Read the folder of a sweep, also while it runs; None: the newest one.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    need_libraries()
    from mtrain.studies.sweep.journal import Journal

    folder = (folder or newest_folder()).absolute()
    request = requests.read(folder)
    journal = Journal(folder)
    try:
        return Opened(folder=folder, request=request, trials=journal.trials())
    finally:
        journal.close()


def _begun(wish: Wish) -> "Order":
    from mtrain.studies.sweep import sweep

    loaded = wish.load()
    request = _request(wish, loaded)
    folder = (wish.out or _next_folder(loaded)).absolute()
    if (folder / REQUEST).exists():
        raise UsageError(f"--out {wish.out}: holds a sweep already; go on with it by --resume, or name another folder")
    if folder.exists() and (not folder.is_dir() or {file.name for file in folder.iterdir()} - requests.FILES):
        raise UsageError(f"--out {wish.out}: is not an empty folder; name another one")
    order = _order(wish, request, folder)
    sweep.refuse_what_cannot_work(order)
    requests.write(request, folder)
    return order


def _resumed(wish: Wish) -> "Order":
    folder = (wish.out or newest_folder()).absolute()
    request = requests.read(folder)
    if not Path(request.folder).is_dir():
        raise UsageError(
            f"{folder}: the sweep was begun in {request.folder}, which is no folder any more; make it again"
        )
    if wish.named != wish.space_is_named:
        raise UsageError(
            "--resume: give the spec and what is searched both, or neither; the folder of the sweep has them"
        )
    changed = _changed_options(wish, request)
    if changed:
        raise UsageError(
            f"--resume: the sweep in {folder} was begun with other settings ({changed}); leave them as they were"
        )
    if wish.trials is not None and wish.trials != request.trials:
        request = request.model_copy(update={"trials": _trials(wish, request)})
        requests.write(request, folder)
    return _order(wish, request, folder)


def _trials(wish: Wish, request: Request) -> int:
    """Return the number of trials in all: a grid has no more than its points."""
    if request.sampler == "grid":
        return min(wish.trials or request.grid_size, request.grid_size)
    return wish.trials or DEFAULT_TRIALS


def _changed_options(wish: Wish, request: Request) -> str:
    """Return in words what the user asks for that the sweep was not begun with; what is not said stays as it was."""
    if wish.named and wish.space_is_named:
        return requests.difference(request, _request(wish, wish.load(), former=request))
    for name in ("sampler", "pruner"):
        asked = getattr(wish, name)
        if asked is not None and asked != getattr(request, name):
            return f"{name}: {getattr(request, name)} before, {asked} now"
    if wish.metric is not None and requests.parsed_metric(wish.metric) != (request.metric, request.direction):
        return f"metric: {request.metric} before, {wish.metric} now"
    return ""


def _request(wish: Wish, loaded: "Loaded", *, former: Request | None = None) -> Request:
    metric, direction = requests.parsed_metric(wish.metric or "score")
    if former is not None and wish.metric is None:
        metric, direction = former.metric, former.direction
    searched = [] if wish.space is None else read_space(wish.space)
    parameters = requests.fitted(distinct([*searched, *read_over(wish.over)]), loaded)
    default: Sampler = "tpe" if searched else "grid"
    request = Request(
        sampler=wish.sampler or (former.sampler if former else default),
        pruner=wish.pruner or (former.pruner if former else "none"),
        metric=metric,
        direction=direction,
        seed=loaded.spec.train.seed,
        trials=wish.trials or DEFAULT_TRIALS,
        parameters=parameters,
        folder=str(Path.cwd()),
        base=dict(loaded.values),
    )
    if request.sampler == "cmaes" and all(one.kind == "choice" for one in parameters):
        raise UsageError(
            "--sampler cmaes: needs a range, `low` and `high`, and all are choices; take another --sampler"
        )
    if request.sampler == "grid" and request.grid_size > 10_000:
        raise UsageError(f"the grid has {request.grid_size} points; search fewer values, or take another --sampler")
    return request.model_copy(update={"trials": _trials(wish, request)})


def _order(wish: Wish, request: Request, folder: Path) -> "Order":
    from mtrain.studies.sweep.gpus import shares
    from mtrain.studies.sweep.sweep import Order
    from mtrain.system import environment

    queued = _is_queued(request)
    several = bool(request.base["cluster"].get("ips"))
    if several and not queued and wish.jobs > 1:
        wish.tell(
            f"--jobs {wish.jobs}: trials on several hosts run on the same GPUs, which are divided on one host only"
        )
    gpus = () if queued or several else shares(request, jobs=wish.jobs, environ=environment.caller())
    return Order(
        folder=folder,
        request=request,
        jobs=wish.jobs,
        max_failures=wish.max_failures,
        queued=queued,
        gpus=gpus,
        tell=wish.tell,
    )


def _is_queued(request: Request) -> bool:
    """Return whether trials go to the queue of a scheduler: the spec names one, and this process is no job of it."""
    from mtrain.jobs import submission
    from mtrain.jobs.hosts import allocation
    from mtrain.jobs.means import AUTO
    from mtrain.spec import config
    from mtrain.system import environment

    loaded = config.load(request.base, environ={})
    if (
        loaded.spec.cluster.name == AUTO
        or allocation.job_id(environment.caller(), registry=loaded.registry) is not None
    ):
        return False
    return loaded.spec.cluster.name in submission.with_queue(loaded)


def _next_folder(loaded: "Loaded") -> Path:
    from mtrain.jobs import start
    from mtrain.system import runfolder

    return runfolder.next_name(Path(loaded.spec.report.dir), f"{start.run_name(loaded)}-sweep")
