"""The torch engine of backends that split arrays over the ranks: it saves whole arrays, and each rank restores its parts."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._torch import state
from mtrain.backends._torch.collective import own_memory
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.sharded.optimizer import PartsOptimizer
from mtrain.backends._torch.sharded.shards import Boxes, Layout, Parts
from mtrain.backends._torch.sharded.streams import StateEntry
from mtrain.core.interfaces import Array, Part, State
from mtrain.core.overriding import override
from mtrain.core.state import checks as state_checks
from mtrain.system.memory import returned_memory


class SplitEngine(TorchEngine):
    """One rank of a job whose optimizer is a ``PartsOptimizer``."""

    timeout = timedelta(minutes=10)
    """A transfer of a part to rank 0 that takes longer ends the job."""
    keep_memory = True
    """The backend's option ``keep_memory``."""

    def returning_memory(self) -> AbstractContextManager[None]:
        """Return freed memory to the kernel at once, while a model is built on the CPU: see ``system.memory``."""
        return returned_memory(keep=self.keep_memory) if self.target.type == "cpu" else nullcontext()

    def release(self, optimizer: PartsOptimizer) -> None:
        """Prepare for changes to this rank's parts of weights; ``publish`` follows. Every rank must call."""

    def publish(self, optimizer: PartsOptimizer) -> None:
        """Let the model follow changed parts. Every rank must call."""

    def held_entries(self, model: nn.Module, parts: Parts) -> dict[str, Tensor]:
        """Return the live entries of the model's state, with this rank's parts of split ones."""
        return {name: parts[name].local if name in parts else own_memory(x) for name, x in model.state_dict().items()}

    @override
    def entries(self, model: nn.Module, optimizer: TorchOptimizer) -> Mapping[Part, Mapping[str, StateEntry]]:
        if not isinstance(optimizer, PartsOptimizer):
            return super().entries(model, optimizer)
        parts = optimizer.parts
        if len(parts):
            self.gather.connect(self.timeout)

        def entry(name: str, tensor: Tensor) -> StateEntry:
            if not _is_split(name, tensor, parts):
                return StateEntry(tensor, tuple(tensor.shape))
            return StateEntry(tensor, parts[name].shape, parts[name].layout)

        return {
            "weights": {name: entry(name, x) for name, x in self.held_entries(model, parts).items()},
            "ema": {name: entry(name, x) for name, x in optimizer.ema().items()},
            "moments": {key: entry(parameter(key), x) for key, x in optimizer.moments().items()},
        }

    @override
    def state(self, model: nn.Module, optimizer: TorchOptimizer) -> State:
        if not isinstance(optimizer, PartsOptimizer):
            return super().state(model, optimizer)
        self.take_buffers_of_rank_0(model, optimizer)
        parts, moments = optimizer.parts, optimizer.moments()
        return State(
            weights=self._arrays(self.held_entries(model, parts), parts),
            ema=self._arrays(optimizer.ema(), parts),
            moments={
                f"{moment}/{name}": array
                for moment in dict.fromkeys(key.partition("/")[0] for key in moments)
                for name, array in self._arrays(_of_moment(moments, moment), parts).items()
            },
            counters=optimizer.counters(),
        )

    def _arrays(self, tensors: Mapping[str, Tensor], parts: Parts) -> dict[str, Array]:
        """Return whole arrays in the order of ``tensors``, gathering those that are split; every rank must call."""
        split = {name: tensor for name, tensor in tensors.items() if _is_split(name, tensor, parts)}
        split_arrays = {name: state.to_numpy(whole) for name, whole in parts.whole(split, self.target)}
        return {
            name: split_arrays[name] if name in split_arrays else state.to_numpy(tensor)
            for name, tensor in tensors.items()
        }

    @override
    def _fill_weights(self, model: nn.Module, optimizer: TorchOptimizer, weights: Mapping[str, Array]) -> None:
        if not isinstance(optimizer, PartsOptimizer):
            super()._fill_weights(model, optimizer, weights)
            return
        self.release(optimizer)
        # Each rank keeps only its part, so arrays that differ between ranks could not be noticed afterwards.
        seen, known = state_checks.Fingerprint(), getattr(weights, "sha256", None)
        watched = seen if self.collective.size > 1 and known is None else None
        self._fill_parts(
            optimizer.parts, self.held_entries(model, optimizer.parts), weights, what="weights", seen=watched
        )
        if self.collective.size > 1:
            state_checks.check_equal_start(self.collective, known or seen.digest)
        self.publish(optimizer)

    @override
    def _fill(
        self, optimizer: TorchOptimizer, targets: Mapping[str, Tensor], values: Mapping[str, Array], *, what: str
    ) -> None:
        if isinstance(optimizer, PartsOptimizer):
            self._fill_parts(optimizer.parts, targets, values, what=what)
        else:
            super()._fill(optimizer, targets, values, what=what)

    @torch.no_grad()
    def _fill_parts(
        self,
        parts: Parts,
        targets: Mapping[str, Tensor],
        values: Mapping[str, Array],
        *,
        what: str,
        seen: state_checks.Fingerprint | None = None,
    ) -> None:
        """Copy whole arrays ``values`` into ``targets``, one at a time.

        Args:
            parts: The arrays that are split, by name of the weight.
            targets: Tensors to fill, by the same keys as ``values``: names, or ``<moment>/<name>``.
            values: Whole arrays.
            what: What the arrays are, for the error message.
            seen: Takes all values in; None: no more is read of them than this rank holds.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        split = {key: parts[parameter(key)] for key, x in targets.items() if _is_split(parameter(key), x, parts)}
        shapes = {key: split[key].shape if key in split else tuple(x.shape) for key, x in targets.items()}
        state_checks.check_fit(shapes, values, what=what)
        for key, target in targets.items():
            array = values[key]
            if seen is not None:
                seen.add(key, array)
            if key in split:
                array = _held_of_file(self.collective.rank, split[key].layout, array)
            target.copy_(torch.from_numpy(np.array(array)).view(target.shape))


def _held_of_file(rank: int, layout: Layout, whole: Array) -> Array:
    """Return the part of ``rank``; of an array in a file, no more is read than that."""
    if isinstance(layout, Boxes):
        return whole[tuple(slice(first, end) for first, end in layout.held[rank])]
    first, end = layout[rank]
    return whole.reshape(-1)[first:end]


def _is_split(name: str, tensor: Tensor, parts: Parts) -> bool:
    """Return whether ``tensor`` is a part of what belongs to weight ``name``; numbers, such as counts, are never split."""
    return name in parts and tensor.dim() > 0


def parameter(key: str) -> str:
    """Return the name of the weight in a key ``<name>`` or ``<moment>/<name>``."""
    return key.rpartition("/")[2]


def _of_moment(moments: Mapping[str, Tensor], moment: str) -> dict[str, Tensor]:
    """Select the tensors of one moment, by name of the parameter."""
    return {key.partition("/")[2]: x for key, x in moments.items() if key.startswith(f"{moment}/")}
