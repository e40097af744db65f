"""The program of the one rank that prunes, see ``rank_program``.

The request is ``prune.json`` in the folder, the answer is ``result.json``, and the weights of
the smaller network are ``weights.safetensors``.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Array
from mtrain.core.record_files import write_json
from mtrain.errors import CheckpointError, UsageError
from mtrain.rank import process
from mtrain.rank.spec.assembly import assemble, given_weights, open_task
from mtrain.spec.resolved import Resolved
from mtrain.system.ending import end_with
from mtrain.system.runfolder import RunFolder
from mtrain.weights import writing
from mtrain_deploy import rank_program
from mtrain_deploy.pruning import REQUEST, RESULT, WEIGHTS
from mtrain_deploy.pruning.measuring import Bench, TrainedNetwork
from mtrain_deploy.pruning.network import ChannelGroup, Prunable, mask, shrink
from mtrain_deploy.pruning.scores import scores_of
from mtrain_deploy.pruning.tracing import trace


def prune(resolved: Resolved, run_folder: RunFolder, weights: Path, *, leave: process.Leaving) -> None:
    """Prune as ``prune.json`` asks, and write the answer and the weights."""
    request = json.loads((run_folder.path / REQUEST).read_text(encoding="utf-8"))
    # Anchors and the like were computed from the training data, and the network is built with them.
    details = store.load(weights).meta["extra"].get("details") if weights.is_dir() else None
    with assemble(resolved, open_task(resolved), leave=leave, training=True, details=details, restored=True) as job:
        if job.plugin.native:
            raise UsageError(
                f"model.name: {resolved.spec.model.name} is a native module; only models on mtrain's layers are pruned"
            )
        state = job.session.state(job.model, job.optimizer).weights
        given = given_weights(weights, state, job.plugin)
        if given.left_over:
            raise CheckpointError(f"{given.summary()}: {'; '.join(given.warnings())}; give weights of this model")
        with closing(Bench(job)) as bench:
            pruning = Pruning(bench, {**state, **given.matched})
            answer, small = pruning.run(**request)
    writing.write(run_folder.path / WEIGHTS, small)
    write_json(run_folder.path / RESULT, answer)


class Pruning:
    """Prunes the network of a job with the given weights."""

    def __init__(self, bench: Bench, weights: Mapping[str, Array]) -> None:
        """Trace the network."""
        job = bench.job
        self._bench = bench
        self._weights = weights
        self._former = job.spec.model.pruned
        traced = trace(
            job.plugin,
            job.task,
            job.session.collective,
            evaluation=bench.evaluation_batch,
            training=bench.training_batch,
            sizes=self._former,
        )
        self._network = Prunable(traced)
        self._whole = TrainedNetwork(model=job.model, optimizer=job.optimizer)

    def run(self, *, target: float, by: Any) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what was found, as plain values, and the weights of the smaller network."""
        bench, network, weights = self._bench, self._network, self._weights
        scores = scores_of(network, weights, by, lambda: iter(bench.gradients(weights, self._former)))
        removed = network.select(scores, target)
        small, sizes = shrink(network, weights, removed), {**(self._former or {}), **network.sizes(removed)}
        # The form for inference has convolutions of its own, whose sizes a spec must name too.
        sizes |= _fused_sizes(bench.job.plugin.fused(small) or {}, small)
        difference, largest = bench.difference(mask(network, weights, removed), small, sizes)
        bench.fill(self._whole, weights)
        before, headline = bench.metrics(self._whole)
        smaller = bench.network(small, sizes)
        after, _ = bench.metrics(smaller)
        times = bench.times_s(self._whole, smaller)
        answer = {
            "sizes": sizes,
            "difference": difference,
            "largest_output": largest,
            "flops": [network.flops(), network.flops(removed)],
            "parameters": [self._parameters(weights), self._parameters(small)],
            "latency_s": list(times),
            "samples_timed": len(bench.evaluation_batch["index"]),
            "metrics": [before, after],
            "headline": headline,
            "groups": [self._row(group, set(removed)) for group in network.groups],
        }
        return answer, small

    def _parameters(self, weights: Mapping[str, Array]) -> int:
        """Return the number of trained and frozen parameters; running statistics and counters do not count."""
        buffers = (".running_mean", ".running_var", ".num_batches_tracked")
        return sum(int(array.size) for name, array in weights.items() if not name.endswith(buffers))

    def _row(self, group: ChannelGroup, removed: set[int]) -> dict[str, Any]:
        stays = sum(number not in removed for number in group.sets)
        return {"group": group.name, "layers": list(group.layers), "channels": [len(group.sets), stays]}


def _fused_sizes(fused: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[str, list[int]]:
    """Return the sizes of the convolutions that only the model's form for inference has."""
    kernels = {name: array for name, array in fused.items() if name not in weights and array.ndim > 1}
    return {name.removesuffix(".weight"): [array.shape[1], array.shape[0]] for name, array in kernels.items()}


main = partial(rank_program.run, prune)


if __name__ == "__main__":
    end_with(main)
