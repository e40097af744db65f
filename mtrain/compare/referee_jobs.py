"""Run the two further jobs of ``mtrain compare`` where backends differ: one update in float64, and one with nudged
weights."""

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from safetensors.numpy import save_file

from mtrain.compare.benches import Bench, on_trial, run_job, with_values
from mtrain.compare.referee import Referee
from mtrain.compare.request import CompareRequest
from mtrain.compare.traces import SCRIPT_LOSS, trace_of
from mtrain.core.interfaces import Array, State
from mtrain.core.state.nudge import nudge_weights
from mtrain.errors import MtrainError
from mtrain.rank.spec import assembly
from mtrain.records.history import read_history
from mtrain_trace import differences
from mtrain_trace.differences import Gap
from mtrain_trace.reading import Trace

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


NUDGED = "nudged.safetensors"


def settle(request: CompareRequest, reference: Bench, state: State, others: Sequence[Bench]) -> Referee | None:
    """Run the float64 jobs, and a nudged job of the reference where the bounds are measured. None: it has no float64.

    ``state``: final state of the reference. ``others``: backends that also run in float64.
    """
    # Rounding of half precision is larger than what float64 could tell apart.
    if reference.precision != "fp32":
        return None
    exact = {}
    for bench in (reference, *others):
        trace = _in_float64(request, bench)
        if trace is not None:
            exact[bench.variant.label] = trace
    if reference.variant.label not in exact:
        return None
    nudged_gap = _nudge(request, reference, state) if request.bounds.measured else None
    return Referee(exact=exact, label=reference.variant.label, nudge=nudged_gap)


def _in_float64(request: CompareRequest, bench: Bench) -> Trace | None:
    if bench.loaded.script is not None:
        return _trace(request, bench, on_trial(bench.loaded, exact=True, updates=1), "float64")
    values = deepcopy(dict(bench.loaded.values))
    # One update: later ones multiply the differences of the first, in float64 as in float32.
    values["train"] |= {"precision": "fp64", "updates": 1}
    return _trace(request, bench, with_values(bench.loaded, values), "float64")


def _trace(request: CompareRequest, bench: Bench, loaded: "Loaded", what: str) -> Trace | None:
    """Run a further job of a backend; report its failure and return None if it fails."""
    try:
        ended = run_job(request, loaded, f"{bench.variant.folder}-{what}")
        if ended.code:
            raise MtrainError(ended.reason)
        trace = trace_of(read_history(ended.folder.metrics), loss=None if loaded.script is None else SCRIPT_LOSS)
    except MtrainError as error:
        request.tell(f"{bench.variant.label}: no {what} job: {error}")
        return None
    shutil.rmtree(ended.folder.checkpoints)
    request.tell(
        f"{bench.variant.label}: {what} job of {len(trace.updates)} update{'s' if len(trace.updates) > 1 else ''}"
    )
    return trace


def _nudge(request: CompareRequest, bench: Bench, state: State) -> Mapping[str, Gap] | None:
    if bench.loaded.script is None:
        trace = _nudged_spec(request, bench, state)
    else:
        trace = _trace(request, bench, on_trial(bench.loaded, nudged=True), "nudged")
    return None if trace is None or bench.trace is None else differences.gaps(bench.trace, trace)


def _nudged_spec(request: CompareRequest, bench: Bench, state: State) -> Trace | None:
    if bench.loaded.job.model_class.native:
        request.tell(
            f"{bench.variant.label}: no nudged job: the start values of a model of your own are known to its ranks alone"
        )
        return None
    start = request.folder / NUDGED
    try:
        save_file(nudge_weights(_start_weights(bench.loaded, state), _trained_names(state)), start)
        values = deepcopy(dict(bench.loaded.values))
        values["model"] |= {"weights": str(start.resolve()), "weights_key": None}
        return _trace(request, bench, with_values(bench.loaded, values), "nudged")
    finally:
        # It is as large as the model.
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
