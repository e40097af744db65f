"""Run the jobs of ``mtrain compare``: one spec or script, a variant of it per backend, one job after the other."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.compare import referee_jobs, several
from mtrain.compare.benches import Bench, bench_of, preflight, repeats_in_one_start, run_job, with_values
from mtrain.compare.profiles import Profile, violations
from mtrain.compare.referee import Referee, with_measured_bounds
from mtrain.compare.request import CompareRequest
from mtrain.compare.results import Against, BackendRow, Comparison
from mtrain.compare.speed import speed_of
from mtrain.compare.traces import SCRIPT_LOSS, trace_of, with_recipe
from mtrain.core.checkpoint import store
from mtrain.core.interfaces import State
from mtrain.core.record_files import write_json
from mtrain.core.update.recipe import make_recipe
from mtrain.errors import UsageError
from mtrain.jobs.run.request_files import describe_environment
from mtrain.records.history import History, read_history
from mtrain.spec import config, outputs
from mtrain.system import runfolder
from mtrain.system.runfolder import RunFolder
from mtrain_trace import comparing
from mtrain_trace.causes import in_words

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def compare(request: CompareRequest) -> Comparison:
    """Run all jobs of a comparison and compare them.

    Raises:
        UsageError: the spec, a backend's options or the folder are wrong; nothing was started.
        ComparisonEnded: a job was asked to end.
    """
    # Before any job of its own, whose load would be taken for that of others.
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    benches = [bench_of(request, variant) for variant in request.variants]
    preflight(request, benches)
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {request.folder}: cannot be made ({error.strerror}); name another folder") from error
    reference: tuple[Bench, State] | None = None
    against: dict[str, Against] = {}
    for bench in (bench for bench in benches if bench.row is None):
        state = _trace(request, bench)
        if state is not None and reference is None:
            reference = bench, state
        elif state is not None and reference is not None:
            against[bench.variant.label] = _against(request, reference[0], bench)
    referee = _settle(request, reference, benches, against) if reference else None
    profile = request.bounds if referee is None else with_measured_bounds(request.bounds, referee)
    if referee is not None:
        against = {label: replace(one, beyond=_beyond(one, profile)) for label, one in against.items()}
    for turn in range(request.rounds):
        alive = [
            bench for bench in benches if bench.row is not None and bench.row.outcome == "done" and not bench.rounds
        ]
        # There and back again: a machine that becomes slower or faster meanwhile then favours none of them.
        for bench in alive if turn % 2 == 0 else reversed(alive):
            _time(request, bench, turn)
    first = reference[0] if reference else benches[0]
    return Comparison(
        title=f"{_subject(first)} on {len(benches)} backends",
        source=_source(first.loaded),
        facts=_facts(first),
        profile=profile,
        updates=_updates(request, benches),
        rows=[_finish(bench) for bench in benches],
        against=against,
        referee=referee,
        load=load,
    )


def write(result: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write the numbers of a comparison as JSON and the page that shows them; returns both files."""
    from mtrain.compare.page import page

    numbers, shown = folder / "compare.json", folder / "compare.html"
    write_json(numbers, result.as_json())
    outputs.write_text(shown, page(result))
    return numbers, shown


# ------------------------------------------------------------------------------------------------------------- the jobs
def _trace(request: CompareRequest, bench: Bench) -> State | None:
    """Run the traced job; return its final state, or None if it failed."""
    label = bench.variant.label
    # Starting a job takes longer than the updates of a comparison, so the job of a backend trains several times where it can: the
    # timed trainings first, each from the same start, and the traced one last.
    if repeats_in_one_start(request, bench):
        names = [f"{bench.variant.folder}-timed-{number + 1}" for number in range(request.rounds)]
        bench.rounds = tuple(runfolder.create(request.folder, name, latest=False) for name in names)
    bench.started = time.time()
    ended = run_job(request, bench.loaded, bench.variant.folder, rounds=bench.rounds)
    folder = ended.folder
    plan = (folder.path / "plan.txt").read_text(encoding="utf-8")
    reason = ended.reason if ended.code else _without_training(bench, folder)
    if reason:
        outcome = "refused" if ended.code == UsageError.exit_code else "failed"
        bench.row = BackendRow(
            label=label,
            outcome=outcome,  # type: ignore[arg-type]
            reason=reason,
            ranks=bench.ranks,
            plan=plan,
        )
        request.tell(f"{label}: {outcome}: {reason}")
        return None
    bench.traced = read_history(folder.metrics)
    trace = trace_of(bench.traced, loss=None if bench.loaded.script is None else SCRIPT_LOSS)
    also = f", and {len(bench.rounds)} times timed," if bench.rounds else ""
    request.tell(f"{label}: {len(trace.updates)} updates traced{also} in {time.time() - bench.started:.0f} s")
    newest = store.newest(folder.checkpoints)
    assert newest is not None, "a finished job has a checkpoint"
    saved = store.load(newest)
    if bench.loaded.script is not None:
        # A checkpoint does not say on which hosts, or in how many shards, its job was trained.
        cluster = bench.loaded.spec.cluster
        bench.spec = config.from_json(json.dumps(saved.spec), name="compare").model_copy(update={"cluster": cluster})
    trace = with_recipe(trace, make_recipe(bench.spec, size=bench.ranks), ranks=bench.ranks)
    # Its weights are in memory now; those of many backends would fill a disk.
    shutil.rmtree(folder.checkpoints)
    for path in bench.rounds:
        _take_timed(request, bench, RunFolder(path), bench.started)
    bench.row = BackendRow(label=label, outcome="done", ranks=bench.ranks, notes=bench.notes, trace=trace, plan=plan)
    return saved.state


def _without_training(bench: Bench, folder: RunFolder) -> str:
    """Return why a job that ended well cannot be compared: a script need not train. Empty: it has trained."""
    if bench.loaded.script is None:
        return ""
    history = read_history(folder.metrics) if folder.metrics.exists() else History()
    if history.updates:
        return ""
    name = bench.loaded.script.path.name
    if "trace" not in history.start:
        return f"{name} ended without a loop over session.batches(...) of mtrain.session(); there is nothing to compare"
    return f"{name} ended its loop over session.batches(...) before the first update; there is nothing to compare"


def _settle(
    request: CompareRequest, reference: tuple[Bench, State], benches: Sequence[Bench], against: Mapping[str, Against]
) -> Referee | None:
    """Compare with float64 where backends differ. None: all have the same bits, or float64 is not available."""
    first, state = reference
    # Nothing is disputed where all have the same bits, and each further job takes as long as the others.
    if all(one.bits for one in against.values()):
        return None
    disputed = [bench for bench in benches if (one := against.get(bench.variant.label)) is not None and one.beyond]
    return referee_jobs.settle(request, first, state, disputed)


def _time(request: CompareRequest, bench: Bench, turn: int) -> None:
    """Run a job as ``mtrain train`` does, to time it; it must end with the bits of the traced one."""
    values = deepcopy(dict(bench.loaded.values))
    # Bytes and waits are counted, as in the timed trainings of a job that trains several times; no state is looked at.
    values["report"]["trace"] = "traffic"
    started = time.time()
    ended = run_job(request, with_values(bench.loaded, values), f"{bench.variant.folder}-timed-{turn + 1}")
    if ended.code:
        request.tell(f"{bench.variant.label}: failed when it was timed: {ended.reason}")
        bench.repeats = False
        return
    history = _take_timed(request, bench, ended.folder, started)
    request.tell(f"{bench.variant.label}: {len(history.updates)} updates timed in {time.time() - started:.0f} s")


def _take_timed(request: CompareRequest, bench: Bench, folder: RunFolder, started: float) -> History:
    """Add the records of a timed training, which must have ended with the bits of the traced one."""
    history = read_history(folder.metrics)
    bench.timed.append((history, started))
    shutil.rmtree(folder.checkpoints)
    same = _result(history) == _result(bench.traced)
    bench.repeats = same if bench.repeats is None else bench.repeats and same
    return history


def _result(history: History | None) -> tuple[Any, Any]:
    end = (history.end if history else None) or {}
    return end.get("weights_sha256"), end.get("ema_sha256")


# ---------------------------------------------------------------------------------------------------------- the results
def _against(request: CompareRequest, first: Bench, bench: Bench) -> Against:
    a, b = first.trace, bench.trace
    assert a is not None
    assert b is not None
    compared = comparing.compare(a, b)
    against = Against(
        difference=compared,
        beyond=(),
        causes=in_words(several.explain(compared), (first.variant.label, bench.variant.label)),
        updates=(len(a.updates), len(b.updates)),
    )
    return replace(against, beyond=_beyond(against, request.bounds))


def _beyond(against: Against, profile: Profile) -> list[str]:
    ours, theirs = against.updates
    lengths = [] if ours == theirs else [f"it ends after {theirs} updates, the reference after {ours}"]
    return [*lengths, *violations(against.difference.gaps, profile)]


def _updates(request: CompareRequest, benches: Sequence[Bench]) -> int:
    """Return the number of updates of the longest job; a script may make fewer than were asked for."""
    lengths = [len(bench.trace.updates) for bench in benches if bench.trace is not None]
    return max(lengths, default=request.updates)


def _subject(bench: Bench) -> str:
    script = bench.loaded.script
    return bench.spec.model.name if script is None else script.path.name


def _source(loaded: "Loaded") -> str:
    script = loaded.script
    return str(loaded.source) if script is None else shlex.join([str(script.path), *script.arguments])


def _finish(bench: Bench) -> BackendRow:
    row = bench.row
    assert row is not None
    if row.outcome != "done" or bench.traced is None:
        return row
    histories = [history for history, _ in bench.timed] or [bench.traced]
    started = [start for _, start in bench.timed][: 1 if bench.rounds else None] or [bench.started]
    batch = bench.spec.train.batch_size
    speed = speed_of(histories, started=started, batch=batch, timed=bool(bench.timed))
    return replace(row, speed=speed, repeats=bench.repeats)


def _facts(bench: Bench) -> dict[str, str]:
    if bench.loaded.script is not None and bench.traced is None:
        return {"machine": _machine()}  # no job has said what the script trains
    spec = bench.spec
    recipe = make_recipe(spec, size=bench.ranks)
    clip = "none" if spec.train.clip_norm is None else f"{spec.train.clip_norm:g}"
    ema = "none" if spec.train.ema is None else f"{spec.train.ema.decay:g}, {spec.train.ema.rule}"
    updates = 0 if bench.trace is None else len(bench.trace.updates)
    return {
        **_data_facts(bench),
        "updates": f"{updates} updates of {spec.train.batch_size} samples: "
        f"{bench.ranks} rank{'s' if bench.ranks > 1 else ''} x {recipe.micro_batch} (micro batch) x "
        f"{recipe.accumulate} (accumulate)",
        "optimizer": f"{recipe.rule}, learning rate {spec.optimizer.learning_rate:g}, {spec.schedule.name}",
        "clipping": clip,
        "average of weights": ema,
        "precision": bench.precision,
        "BatchNorm over ranks": "yes" if recipe.sync_batchnorm else "no",
        "seed": str(spec.train.seed),
        "machine": _machine(),
        "versions": _versions(),
    }


def _data_facts(bench: Bench) -> dict[str, str]:
    spec = bench.spec
    if bench.loaded.script is None:
        side = spec.data.input_side
        return {"model": spec.model.name, "data": f"{spec.data.format}, {side} px" if side else spec.data.format}
    start = {} if bench.traced is None else bench.traced.start
    return {"model": str(start.get("model")), "data": f"{start.get('train_samples')} samples"}


def _machine() -> str:
    environment = describe_environment({})
    return f"{environment['platform']}, {environment['cores']} cores"


def _versions() -> str:
    versions = describe_environment({})["versions"]
    # Those that compute or exchange something; others change no result.
    packages = ("mtrain", "torch", "paddlepaddle", "horovod", "deepspeed", "numpy")
    return ", ".join(f"{name} {versions[name]}" for name in packages if name in versions)
