"""Run the two further jobs of ``mtrain compare`` where backends differ: one update in float64, and one with nudged
weights."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.numpy import save_file

from mtrain.compare.benches import on_trial, with_values
from mtrain.compare.referee import Referee
from mtrain.compare.traces import SCRIPT_LOSS, trace_of
from mtrain.core.interfaces import Array, State
from mtrain.core.state.nudge import nudge_weights
from mtrain.errors import MtrainError
from mtrain.rank.spec import assembly
from mtrain.records.history import read_history
from mtrain.system.runfolder import RunFolder
from mtrain_trace import differences
from mtrain_trace.differences import Gap
from mtrain_trace.reading import Trace

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedJob:
    """A job that has ended."""

    code: int
    """Its exit code."""
    reason: str
    """Why it failed, in one line; empty if it did not."""
    folder: RunFolder


Run = Callable[["Loaded", str], EndedJob]
"""Runs a spec in a new run folder of the given name."""
NUDGED = "nudged.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A backend whose traced job has ended."""

    label: str
    folder: str
    loaded: "Loaded"
    precision: str
    """Precision of the job; a script may have chosen it."""
    trace: Trace


@dataclass(frozen=True, kw_only=True)
class Settling:
    """Functions and folder for running further jobs."""

    run: Run
    tell: Callable[[str], None]
    out: Path


def settle(
    settling: Settling, reference: Entry, state: State, others: Sequence[Entry], *, nudge: bool
) -> Referee | None:
    """Run the float64 jobs, and with ``nudge`` a nudged job of the reference. None: the reference has no float64.

    ``state``: final state of the reference. ``others``: backends that also run in float64.
    """
    if reference.precision != "fp32":
        return None
    exact = {}
    for entry in (reference, *others):
        trace = _in_float64(settling, entry)
        if trace is not None:
            exact[entry.label] = trace
    if reference.label not in exact:
        return None
    nudged_gap = _nudge(settling, reference, state) if nudge else None
    return Referee(exact=exact, label=reference.label, nudge=nudged_gap)


def _in_float64(settling: Settling, entry: Entry) -> Trace | None:
    if entry.loaded.script is not None:
        return _trace(settling, entry, on_trial(entry.loaded, exact=True, updates=1), "float64")
    values = deepcopy(dict(entry.loaded.values))
    values["train"] |= {"precision": "fp64", "updates": 1}
    return _trace(settling, entry, with_values(entry.loaded, values), "float64")


def _trace(settling: Settling, entry: Entry, loaded: "Loaded", what: str) -> Trace | None:
    """Run a further job of a backend; report its failure and return None if it fails."""
    try:
        ended = settling.run(loaded, f"{entry.folder}-{what}")
        if ended.code:
            raise MtrainError(ended.reason)
        trace = trace_of(read_history(ended.folder.metrics), loss=None if loaded.script is None else SCRIPT_LOSS)
    except MtrainError as error:
        settling.tell(f"{entry.label}: no {what} job: {error}")
        return None
    shutil.rmtree(ended.folder.checkpoints)
    settling.tell(f"{entry.label}: {what} job of {len(trace.updates)} update{'s' if len(trace.updates) > 1 else ''}")
    return trace


def _nudge(settling: Settling, entry: Entry, state: State) -> Mapping[str, Gap] | None:
    if entry.loaded.script is None:
        trace = _nudged_spec(settling, entry, state)
    else:
        trace = _trace(settling, entry, on_trial(entry.loaded, nudged=True), "nudged")
    return None if trace is None else differences.gaps(entry.trace, trace)


def _nudged_spec(settling: Settling, entry: Entry, state: State) -> Trace | None:
    if entry.loaded.job.model_class.native:
        settling.tell(
            f"{entry.label}: no nudged job: the start values of a model of your own are known to its ranks alone"
        )
        return None
    start = settling.out / NUDGED
    try:
        save_file(nudge_weights(_start_weights(entry.loaded, state), _trained_names(state)), start)
        values = deepcopy(dict(entry.loaded.values))
        values["model"]["weights"] = str(start.resolve())
        return _trace(settling, entry, with_values(entry.loaded, values), "nudged")
    finally:
        start.unlink(missing_ok=True)


def _start_weights(loaded: "Loaded", state: State) -> dict[str, Array]:
    """Compute the start weights of a job without a framework; ``state`` gives their names and shapes."""
    spec = loaded.spec
    data, plugin = assembly.open_task(loaded.job), loaded.job.model
    task = plugin.prepare_task(data.task(), data.statistics())
    shapes = {name: tuple(array.shape) for name, array in state.weights.items()}
    start = assembly.StartWeights(spec=spec, plugin=plugin, task=task, shapes=shapes)
    return dict(start.make(weights_file=spec.model.weights, training=True)[0])


def _trained_names(state: State) -> set[str]:
    return {key.split("/", 1)[1] for key in state.moments}
