"""Run the jobs of ``mtrain compare``: one spec, a variant of it per backend, one job after the other."""

import io
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.cluster import start as starting
from mtrain.comparing import referee_jobs
from mtrain.comparing.arrays import farthest, state_of
from mtrain.comparing.causes import Facts, causes
from mtrain.comparing.differences import difference
from mtrain.comparing.profiles import Profile, violations
from mtrain.comparing.referee import Referee, measured
from mtrain.comparing.results import Against, Comparison, Row
from mtrain.comparing.speed import speed_of
from mtrain.comparing.traces import trace_of
from mtrain.core.checkpoint import store
from mtrain.core.interfaces import State
from mtrain.core.recipe import make_recipe
from mtrain.errors import LaunchError, MtrainError, SpecError, UsageError
from mtrain.report.history import History, read_history
from mtrain.spec import config, plugins
from mtrain.spec.yaml_reader import parse_value
from mtrain.system import runfolder
from mtrain.system.runfolder import RunFolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

ENDED = (130, 143)
"""Exit codes of a job that was asked to end from outside."""
ALONE = "none"
"""Rendezvous of a backend that trains in one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One entry of ``--backends``."""

    label: str
    name: str
    options: Mapping[str, Any]
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec, for this backend alone."""

    @property
    def folder(self) -> str:
        """Return the label in a form that suits the name of a run folder."""
        return re.sub(r"[^\w.=-]+", "-", self.label)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The settings of a comparison."""

    config: str | None
    overrides: Sequence[str]
    variants: Sequence[Variant]
    updates: int
    ranks: int
    profile: Profile
    rounds: int
    """Number of timed jobs of each backend."""
    out: Path
    tell: Callable[[str], None]
    """Receives one line at a time about the progress."""


@dataclass(kw_only=True)
class _Bench:
    """A variant with its spec and the results of its jobs so far."""

    variant: Variant
    loaded: "Loaded"
    ranks: int
    notes: list[str]
    row: Row | None = None
    traced: History | None = None
    started: float = 0.0
    timed: list[tuple[History, float]] = field(default_factory=list)
    repeats: bool | None = None


class Ended(MtrainError):
    """A job was asked to end from outside, and the comparison ends with it."""

    def __init__(self, code: int) -> None:
        super().__init__("ended from outside; nothing was compared")
        self.exit_code = code


def parse_variants(text: str) -> list[Variant]:
    """Parse the value of ``--backends``, such as
    ``ddp,deepspeed:stage=3,solo:framework=paddle:train.channels_last=false``.

    Raises:
        UsageError: an entry is malformed, or occurs twice.
    """
    variants: list[Variant] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, *settings = entry.split(":")
        options, overrides = {}, []
        for setting in settings:
            key, sign, value = setting.partition("=")
            if not sign or not key:
                raise UsageError(
                    f"--backends {entry}: {setting!r} given, expected KEY=VALUE, for example deepspeed:stage=3"
                )
            if "." in key:
                overrides.append(setting)
                continue
            try:
                options[key] = parse_value(value)
            except ValueError as error:
                raise UsageError(
                    f"--backends {entry}: {key}: {error}; a value there has no comma and no colon"
                ) from error
        variants.append(Variant(label=entry, name=name, options=options, overrides=overrides))
    labels = [variant.label for variant in variants]
    duplicates = sorted({label for label in labels if labels.count(label) > 1})
    if duplicates or not variants:
        problem = f"{', '.join(duplicates)} is given twice" if duplicates else "names no backend"
        raise UsageError(f"--backends {text}: {problem}; expected for example ddp,horovod,deepspeed:stage=3")
    return variants


def compare(order: Order) -> Comparison:
    """Run all jobs of a comparison and compare them.

    Raises:
        UsageError: the spec, a backend's options or the folder are wrong; nothing was started.
        Ended: a job was asked to end.
    """
    benches = [_bench(order, variant) for variant in order.variants]
    _preflight(order, benches)
    try:
        order.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {order.out}: cannot be made ({error.strerror}); name another folder") from error
    reference: tuple[_Bench, State] | None = None
    against: dict[str, Against] = {}
    for bench in (bench for bench in benches if bench.row is None):
        state = _trace(order, bench)
        if state is not None and reference is None:
            reference = bench, state
        elif state is not None and reference is not None:
            against[bench.variant.label] = _against(order, reference, (bench, state))
    referee = _settle(order, reference, benches, against) if reference else None
    profile = order.profile if referee is None else measured(order.profile, referee)
    if referee is not None:
        against = {label: replace(one, beyond=violations(one.difference, profile)) for label, one in against.items()}
    for turn in range(order.rounds):
        alive = [bench for bench in benches if bench.row is not None and bench.row.outcome == "done"]
        for bench in alive if turn % 2 == 0 else reversed(alive):
            _time(order, bench, turn)
    first = reference[0] if reference else benches[0]
    return Comparison(
        title=f"{first.loaded.spec.model.name} on {len(benches)} backends",
        source=str(first.loaded.source),
        facts=_facts(order, first),
        profile=profile,
        updates=order.updates,
        rows=[_finished(bench) for bench in benches],
        against=against,
        referee=referee,
    )


def write(result: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write the figures of a comparison as JSON and the page that shows them; returns both files."""
    from mtrain.comparing.page import page
    from mtrain.report.reporter import write_json

    figures, shown = folder / "compare.json", folder / "compare.html"
    write_json(figures, result.as_json())
    shown.write_text(page(result), encoding="utf-8")
    return figures, shown


# ------------------------------------------------------------------------------------------------------------ the specs
def _common(order: Order) -> dict[str, Any]:
    """Return the settings of every job of a comparison: its length, its own logs, no evaluation, one checkpoint at the
    end."""
    return {
        "train.updates": order.updates,
        "train.epochs": None,
        "cluster.nproc_per_node": order.ranks,
        "cluster.ips": [],
        "cluster.max_restarts": 0,
        "cluster.log_dir": None,
        "evaluate.every_epochs": None,
        "evaluate.every_updates": None,
        "evaluate.at_end": False,
        "checkpoint.every_epochs": None,
        "checkpoint.every_updates": None,
        "checkpoint.every_minutes": None,
        "report.dir": str(order.out),
        "report.every_updates": 1,
        "report.tensorboard": False,
        "report.plots": False,
        "report.trace": "state",
    }


def _bench(order: Order, variant: Variant) -> _Bench:
    common = _common(order)
    for setting in variant.overrides:
        path, value = setting.split("=", 1)
        if path in common or path == "backend.name":
            raise UsageError(f"--backends {variant.label}: {path}={value} given, but a comparison sets {path} itself")
    flags = {path: config.Given(value, f"compare: {path}={value}") for path, value in common.items()}
    loaded = config.load(order.config, overrides=[*order.overrides, *variant.overrides], flags=flags)
    policy = loaded.policy
    plugin = plugins.load("backends", variant.name, policy=policy)
    spec_backend = loaded.spec.backend
    shared_options = {
        key: value
        for key, value in spec_backend.options.items()
        if spec_backend.name == variant.name or key in plugin.Options.model_fields
    }
    options = {**shared_options, **variant.options}
    checked_options = plugins.options(
        "backends", variant.name, options, path=f"--backends {variant.label}", policy=policy
    )
    values = deepcopy(dict(loaded.values))
    values["backend"] |= {"name": variant.name, "options": options}
    notes, ranks = [], order.ranks
    dropped = sorted(spec_backend.options.keys() - options.keys())
    if dropped:
        notes.append(f"backend.options of the spec that it does not have: {', '.join(dropped)}")
    if plugins.made("backends", variant.name, checked_options, policy=policy).rendezvous == ALONE and order.ranks > 1:
        recipe = make_recipe(loaded.spec, size=order.ranks)
        ranks, values["cluster"]["nproc_per_node"] = 1, 1
        values["train"]["accumulate"] = recipe.accumulate * order.ranks
        notes.append(
            f"one rank, with {recipe.accumulate * order.ranks} micro batches per update: the same ones as on "
            f"{order.ranks} ranks"
        )
    return _Bench(variant=variant, loaded=_with(loaded, values), ranks=ranks, notes=notes)


def _with(loaded: "Loaded", values: Mapping[str, Any]) -> "Loaded":
    spec = config.from_json(json.dumps(values), name="compare")
    return replace(loaded, spec=spec, values=spec.model_dump(mode="json"))


def _preflight(order: Order, benches: Sequence[_Bench]) -> None:
    """Check the requirements of each backend and make its plan; check the data once, on the first backend that can
    run.

    A backend that is not installed or refuses the job gets its row at once, and the others are compared.

    Raises:
        UsageError: after refusals fewer than two backends are left to compare.
    """
    from mtrain.jobs import preflight
    from mtrain.system import interpreter

    data_checked = False
    refusals: list[UsageError] = []
    for bench in benches:
        spec = bench.loaded.spec
        make_recipe(spec, size=bench.ranks)
        try:
            interpreter.check(spec)
        except SpecError:
            raise
        except UsageError as error:
            bench.row = Row(label=bench.variant.label, outcome="absent", reason=str(error).rstrip("; "))
            order.tell(f"{bench.variant.label}: not installed")
            continue
        try:
            starting.planned(bench.loaded, starting.Where(run_dir=order.out / bench.variant.folder, checkpoint=None))
        except UsageError as error:
            refusals.append(error)
            bench.row = Row(label=bench.variant.label, outcome="refused", reason=str(error))
            order.tell(f"{bench.variant.label}: refused: {error}")
            continue
        if not data_checked:
            for note in preflight.check(spec, size=bench.ranks):
                order.tell(note)
            data_checked = True
    if refusals and sum(bench.row is None for bench in benches) < 2:
        raise refusals[0]


# ------------------------------------------------------------------------------------------------------------- the jobs
def _trace(order: Order, bench: _Bench) -> State | None:
    """Run the traced job; return its final state, or None if it failed."""
    label = bench.variant.label
    bench.started = time.time()
    ended = _run(bench.loaded, order.out, bench.variant.folder)
    folder = ended.folder
    plan = (folder.path / "plan.txt").read_text(encoding="utf-8")
    if ended.code:
        outcome = "refused" if ended.code == UsageError.exit_code else "failed"
        bench.row = Row(
            label=label,
            outcome=outcome,  # type: ignore[arg-type]
            reason=ended.reason,
            ranks=bench.ranks,
            plan=plan,
        )
        order.tell(f"{label}: {outcome}: {ended.reason}")
        return None
    order.tell(f"{label}: {order.updates} updates traced in {time.time() - bench.started:.0f} s")
    bench.traced = read_history(folder.metrics)
    newest = store.newest(folder.checkpoints)
    assert newest is not None, "a finished job has a checkpoint"
    state = state_of(newest)
    shutil.rmtree(folder.checkpoints)
    bench.row = Row(
        label=label,
        outcome="done",
        ranks=bench.ranks,
        notes=bench.notes,
        trace=trace_of(bench.traced),
        plan=plan,
    )
    return state


def _settle(
    order: Order, reference: tuple[_Bench, State], benches: Sequence[_Bench], against: Mapping[str, Against]
) -> Referee | None:
    """Compare with float64 where backends differ. None: all have the same bits, or float64 is not available."""
    first, state = reference
    if all(one.bits for one in against.values()):
        return None
    entries = {
        bench.variant.label: referee_jobs.Entry(
            label=bench.variant.label, folder=bench.variant.folder, loaded=bench.loaded, trace=bench.row.trace
        )
        for bench in benches
        if bench.row is not None and bench.row.trace is not None
    }
    settling = referee_jobs.Settling(
        run=lambda loaded, name: _run(loaded, order.out, name), with_values=_with, tell=order.tell, out=order.out
    )
    disputed = [entries[label] for label, one in against.items() if one.beyond]
    nudge = order.profile.measured
    return referee_jobs.settle(settling, entries[first.variant.label], state, disputed, nudge=nudge)


def _time(order: Order, bench: _Bench, turn: int) -> None:
    """Run a job as ``mtrain train`` does, to time it; it must end with the bits of the traced one."""
    values = deepcopy(dict(bench.loaded.values))
    values["report"]["trace"] = "traffic"
    started = time.time()
    ended = _run(_with(bench.loaded, values), order.out, f"{bench.variant.folder}-timed-{turn + 1}")
    if ended.code:
        order.tell(f"{bench.variant.label}: failed when it was timed: {ended.reason}")
        bench.repeats = False
        return
    order.tell(f"{bench.variant.label}: {order.updates} updates timed in {time.time() - started:.0f} s")
    history = read_history(ended.folder.metrics)
    bench.timed.append((history, started))
    shutil.rmtree(ended.folder.checkpoints)
    same = _result(history) == _result(bench.traced)
    bench.repeats = same if bench.repeats is None else bench.repeats and same


def _result(history: History | None) -> tuple[Any, Any]:
    end = (history.end if history else None) or {}
    return end.get("weights_sha256"), end.get("ema_sha256")


def _run(loaded: "Loaded", out: Path, name: str) -> referee_jobs.EndedJob:
    """Run one job to its end, without showing its messages.

    Raises:
        Ended: the job was asked to end.
    """
    folder = runfolder.create(out, name, latest=False)
    where, unseen = starting.Where(run_dir=folder, checkpoint=None), io.StringIO()
    try:
        result = starting.run_job(loaded, where, quiet=True, stream=unseen)
    except LaunchError as error:
        return referee_jobs.EndedJob(code=error.exit_code, reason=str(error), folder=RunFolder(folder))
    if result.code in ENDED:
        raise Ended(result.code)
    return referee_jobs.EndedJob(code=result.code, reason=result.reason, folder=RunFolder(folder))


# ---------------------------------------------------------------------------------------------------------- the results
def _against(order: Order, reference: tuple[_Bench, State], other: tuple[_Bench, State]) -> Against:
    (first, ours), (bench, theirs) = reference, other
    assert first.row is not None
    assert bench.row is not None
    a, b = first.row.trace, bench.row.trace
    assert a is not None
    assert b is not None
    gap = difference(a, b)
    facts = Facts(recipe=make_recipe(bench.loaded.spec, size=bench.ranks), ranks=bench.ranks)
    return Against(
        difference=gap,
        farthest=farthest(ours, theirs),
        beyond=violations(gap, order.profile),
        causes=causes(a, b, gap, facts),
    )


def _finished(bench: _Bench) -> Row:
    row = bench.row
    assert row is not None
    if row.outcome != "done" or bench.traced is None:
        return row
    histories = [history for history, _ in bench.timed] or [bench.traced]
    started = [start for _, start in bench.timed] or [bench.started]
    batch = bench.loaded.spec.train.batch_size
    speed = speed_of(histories, started=started, batch=batch, timed=bool(bench.timed))
    return replace(row, speed=speed, repeats=bench.repeats)


def _facts(order: Order, bench: _Bench) -> dict[str, str]:
    spec = bench.loaded.spec
    recipe = make_recipe(spec, size=bench.ranks)
    environment = runfolder.describe_environment({})
    packages = ("mtrain", "torch", "paddlepaddle", "horovod", "deepspeed", "numpy")
    versions = {name: environment["versions"][name] for name in packages if name in environment["versions"]}
    clip = "none" if spec.train.clip_norm is None else f"{spec.train.clip_norm:g}"
    ema = "none" if spec.train.ema is None else f"{spec.train.ema.decay:g}, {spec.train.ema.rule}"
    return {
        "model": spec.model.name,
        "data": f"{spec.data.format}, {spec.data.input_side} px" if spec.data.input_side else spec.data.format,
        "updates": f"{order.updates} updates of {spec.train.batch_size} samples: "
        f"{bench.ranks} rank{'s' if bench.ranks > 1 else ''} x {recipe.micro_batch} (micro batch) x "
        f"{recipe.accumulate} (accumulate)",
        "optimizer": f"{recipe.rule}, rate {spec.optimizer.rate:g}, {spec.schedule.name}",
        "clipping": clip,
        "average of weights": ema,
        "precision": recipe.precision,
        "BatchNorm over ranks": "yes" if recipe.sync_batchnorm else "no",
        "seed": str(spec.train.seed),
        "machine": f"{environment['platform']}, {environment['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
