"""Compare what was recorded of trainings: traces of ``mtrain-trace``, run folders of mtrain, and mixtures of both."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mtrain_trace.command
import mtrain_trace.wording
from mtrain.compare.traces import SCRIPT_LOSS, read_records, with_recipe
from mtrain.core.checkpoint import format as checkpoints
from mtrain.core.checkpoint import store
from mtrain.core.update.recipe import make_recipe
from mtrain.errors import CannotTell, MtrainError, UsageError
from mtrain.records.history import History, read_history
from mtrain.spec import config
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes
from mtrain.spec.model import Spec
from mtrain.spec.schema import leaves
from mtrain.system.runfolder import RunFolder
from mtrain_trace.comparing import Comparison
from mtrain_trace.reading import Trace, TraceError, read_all, refusing_what_is_broken

MOST_KEYS = 6
"""Most keys of two specs that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRequest:
    """A request to compare trainings that have ended."""

    folders: Sequence[Path]
    """Traces and run folders; the first one counts as right."""
    calibration: Path | None = None
    """The first one again, recorded with start weights moved by one unit in the last place."""
    optimizer: int | None = None
    """Number of the optimizer; None: all that both have."""
    bits: bool = False
    """Whether rounding counts as a difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedResult:
    """One training beside the first one."""

    folder: Path
    comparisons: Sequence[Comparison]
    code: int
    """Exit code, as that of ``mtrain-trace compare``."""

    def text(self) -> Sequence[str]:
        """Return the comparison for a terminal, as ``mtrain-trace compare`` prints it."""
        return mtrain_trace.wording.text(list(self.comparisons))

    def json(self) -> str:
        """Return the comparison as JSON, as ``mtrain-trace compare --json`` prints it."""
        return mtrain_trace.command.json_of(self.comparisons)


def compare(request: RecordedRequest) -> list[RecordedResult]:
    """Compare each training with the first one.

    Raises:
        UsageError: a folder holds neither a trace nor a run, or fewer than two are given.
    """
    if len(request.folders) < 2:
        given = " ".join(map(str, request.folders))
        raise UsageError(
            f"{given}: expected two or more folders, traces of `mtrain-trace run` or run folders of mtrain"
        )
    first, *others = request.folders
    try:
        ours = read(first, optimizer=request.optimizer)
        nudged = [] if request.calibration is None else read(request.calibration, optimizer=request.optimizer)
        results = []
        for folder in others:
            theirs = read(folder, optimizer=request.optimizer)
            found = mtrain_trace.command.compare_traces(ours, theirs, calibration=nudged)
            # What differs between the specs is the likeliest cause, so it comes before what the updates show.
            for comparison in found:
                told = _other_keys(comparison)
                (comparison.remarks if comparison.parting is None else comparison.sentences)[:0] = told
            code = mtrain_trace.command.verdict_code(found, bits=request.bits)
            results.append(RecordedResult(folder=folder, comparisons=found, code=code))
    except TraceError as error:
        raise error_of(error) from error
    return results


def error_of(error: TraceError) -> MtrainError:
    """Return the error of mtrain that has the message and the exit code of one of ``mtrain_trace``."""
    is_use = mtrain_trace.command.code_of(error) == UsageError.exit_code
    return UsageError(str(error)) if is_use else CannotTell(str(error))


def read(folder: Path, *, optimizer: int | None = None) -> list[Trace]:
    """Return what a folder holds of a training: a trace for each optimizer, or for the one with a number.

    Raises:
        TraceError: it is no folder, or holds neither a trace nor a run.
    """
    if not RunFolder(folder).metrics.is_file():
        return read_all(folder, optimizer=optimizer)
    # Number 0 is that of the only one.
    if optimizer:
        raise TraceError(f"{folder}: a run of mtrain has one optimizer; no number {optimizer} (they count from 0)")
    with refusing_what_is_broken(folder):
        return [_read_run(RunFolder(folder))]


def _read_run(run: RunFolder) -> Trace:
    history = read_history(run.metrics)
    if not history.updates:
        raise TraceError(f"{run.path}: the run has ended before its first update; there is nothing to compare")
    try:
        is_script = "total" not in history.updates[min(history.updates)]["losses"]
        trace = read_records(history, loss=SCRIPT_LOSS if is_script else None, folder=run.path)
        ranks = int(history.start.get("ranks", 1))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TraceError(f"{run.metrics}: is damaged, or not of a training: {error!r}") from error
    told = {"framework": "mtrain", "mtrain": str(history.start.get("backend", "?")), "ranks": ranks}
    trace = replace(trace, processes=[{**trace.processes[0], **told}], remarks=_unseen(run, history))
    try:
        spec = _spec(run, is_script=is_script)
        recipe = make_recipe(spec, size=ranks)
    except (MtrainError, OSError, ValueError) as error:
        remark = f"{run.path}: its spec cannot be read, so settings but the rates are not seen ({error})"
        return replace(trace, remarks=[*trace.remarks, remark])
    trace = with_recipe(trace, recipe, ranks=ranks)
    keys = {key: json.dumps(value, ensure_ascii=False) for key, value in leaves(spec.model_dump(mode="json"))}
    process = {**trace.processes[0], "samples_per_update": spec.train.batch_size, "spec": keys}
    return replace(_with_clips(trace, recipe.clip_norm), processes=[process])


def _other_keys(comparison: Comparison) -> list[str]:
    """Say in which keys the specs of two runs differ, but for those that train nothing; empty where one of them is not known."""
    mine, other = (trace.processes[0].get("spec", {}) for trace in (comparison.a, comparison.b))
    names = [
        name
        for name in (mine if mine and other else {})
        if mine[name] != other.get(name) and name.partition(".")[0] not in ("report", "checkpoint", "cluster")
    ]
    shown = [f"{name} {mine[name]} and {other.get(name, 'none')}" for name in names[:MOST_KEYS]]
    more = f" and {len(names) - MOST_KEYS} more" if len(names) > MOST_KEYS else ""
    return [f"the specs differ (A and B): {'; '.join(shown)}{more}"] if names else []


def _spec(run: RunFolder, *, is_script: bool) -> Spec:
    """Return the resolved spec of a run."""
    # What a script has asked for is in its checkpoints alone.
    place = run.spec_json if not is_script else store.newest(run.checkpoints)
    if place is None:
        raise UsageError("a script's settings are in its checkpoints, and there is none")
    found = (
        checkpoints.read_description(place).get("spec")
        if is_script
        else parse_json(read_bytes(place, limit=MAX_OWN_BYTES))
    )
    # Plugins that the folder alone declares are not trusted to run code; those of the current folder are the user's own.
    values = {**found, "plugins": None} if isinstance(found, dict) else found
    return config.from_json(json.dumps(values), name=str(place))


def _with_clips(trace: Trace, limit: float) -> Trace:
    """Return a trace whose updates say how their gradients were clipped, as the recorder of other scripts sees it."""
    updates = []
    for update in trace.updates:
        norm = update.told_norm if math.isfinite(limit) else None
        updates.append(replace(update, clips=[None if norm is None else {"before": norm, "limit": limit}]))
    return replace(trace, updates=updates)


def _unseen(run: RunFolder, history: History) -> list[str]:
    """Say what a run folder does not hold."""
    if "trace" in history.start:
        return []
    return [f"{run.path}: not seen: samples, weights, moments, buffers (they are recorded with -o report.trace=state)"]
