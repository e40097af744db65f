"""A network as pruning sees it: sets of channels that can be removed, and what removing them saves.

FLOPs are two for each multiplication of a convolution or linear layer, for one sample in evaluation; everything else is
left out, as is usual.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.network.pruned import SIZE_ARGUMENTS
from mtrain.errors import UsageError
from mtrain_deploy.pruning.channels import FIXED, Ids
from mtrain_deploy.pruning.tracing import Layer, Trace, layer_macs

Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
LEAST = 0.1
"""Share of a group's sets that always stays, and at least one."""


@dataclass(frozen=True, kw_only=True)
class ChannelGroup:
    """Sets of channels that the same layers write."""

    layers: tuple[str, ...]
    """Names of the convolutions and linear layers that write them; the first names the group."""
    sets: tuple[int, ...]
    """Identities of the sets, in the order of channels."""

    @property
    def name(self) -> str:
        """Return the group's name for tables."""
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.layers[0]}{more}"


class Prunable:
    """The traced network, with the sets of channels that can be removed."""

    def __init__(self, trace: Trace) -> None:
        """Collect the sets of a trace."""
        self.layers: Mapping[str, Layer] = trace.layers
        roots = trace.channels.roots
        self.inputs: dict[str, Ids] = {}
        """Identity of the set of each input channel, by layer."""
        self.outputs: dict[str, Ids] = {}
        for name, layer in trace.layers.items():
            assert layer.inputs is not None
            assert layer.outputs is not None
            self.inputs[name], self.outputs[name] = roots(layer.inputs), roots(layer.outputs)

    @cached_property
    def groups(self) -> list[ChannelGroup]:
        """The groups of sets that can be removed, in the order of the model."""
        writers: dict[int, list[str]] = {}
        for name, ids in self.outputs.items():
            if self.layers[name].kind != "BatchNorm2d":
                for number in dict.fromkeys(int(i) for i in ids):
                    writers.setdefault(number, []).append(name)
        members: dict[tuple[str, ...], list[int]] = {}
        for number, names in sorted(writers.items()):
            if number != FIXED:
                members.setdefault(tuple(names), []).append(number)
        return [ChannelGroup(layers=names, sets=tuple(sets)) for names, sets in members.items()]

    def flops(self, removed: Collection[int] = ()) -> int:
        """Return the FLOPs of one sample without the sets ``removed``."""
        gone = np.fromiter(removed, np.int64, len(removed))
        return 2 * sum(
            layer_macs(
                layer,
                inputs=int((~np.isin(self.inputs[name], gone)).sum()),
                outputs=int((~np.isin(self.outputs[name], gone)).sum()),
            )
            for name, layer in self.layers.items()
        )

    def sizes(self, removed: Collection[int]) -> dict[str, list[int]]:
        """Return the sizes of the layers that are smaller without the sets ``removed``, see ``core.network.pruned.Sizes``."""
        sizes: dict[str, list[int]] = {}
        for name, layer in self.layers.items():
            kept_inputs, kept_outputs = self.what_stays(name, removed)
            if not (kept_inputs.all() and kept_outputs.all()):
                both = [int(kept_inputs.sum()), int(kept_outputs.sum())]
                sizes[name] = both[: len(SIZE_ARGUMENTS[layer.kind])]
        return sizes

    def what_stays(self, name: str, removed: Collection[int]) -> tuple[Bools, Bools]:
        """Return which input and output channels of a layer stay."""
        gone = np.fromiter(removed, np.int64, len(removed))
        return ~np.isin(self.inputs[name], gone), ~np.isin(self.outputs[name], gone)

    def select(self, scores: Mapping[int, float], target: float) -> list[int]:
        """Return the fewest sets, least important first, without which at most ``target`` of the FLOPs is left.

        A tenth of each group stays, and at least one of its sets. Sets without a score stay too.

        Raises:
            UsageError: so much cannot be removed.
        """
        candidates = self._candidates(scores)
        whole = self.flops()
        low, high = 0, len(candidates)
        least = self.flops(candidates) / whole
        if least > target:
            raise UsageError(
                f"--target {target:g}: at least {least:.3f} of the FLOPs stays, in layers whose channels cannot be removed "
                f"and a tenth of all others; give a target from {least + 0.005:.2f} to 1"
            )
        while low < high:  # FLOPs fall with every set that is removed
            middle = (low + high) // 2
            if self.flops(candidates[:middle]) <= target * whole:
                high = middle
            else:
                low = middle + 1
        return candidates[:low]

    def _candidates(self, scores: Mapping[int, float]) -> list[int]:
        """Return the sets that may be removed, the least important first."""
        candidates: list[int] = []
        for group in self.groups:
            candidates += least_important(group, scores, len(group.sets))
        # The number decides between equal scores, so that a repeated call removes the same channels.
        return sorted(candidates, key=lambda number: (scores[number], number))


def least_important(group: ChannelGroup, scores: Mapping[int, float], count: int) -> list[int]:
    """Return ``count`` sets of a group with the lowest scores, or as many as may be removed."""
    scored = sorted((number for number in group.sets if number in scores), key=lambda n: (scores[n], n))
    stay = max(1, round(LEAST * len(group.sets)))
    removable = max(0, min(len(scored), len(group.sets) - stay))
    return scored[: min(count, removable)]


def shrink(network: Prunable, weights: Mapping[str, Array], removed: Collection[int]) -> dict[str, Array]:
    """Return the weights of the network without the sets ``removed``."""
    result = dict(weights)
    for name in network.layers:
        for array_name, keeps in _axes(network, name, weights, removed).items():
            array = weights[array_name]
            for axis, kept in keeps:
                array = np.compress(kept, array, axis=axis)
            result[array_name] = np.ascontiguousarray(array)
    return result


def mask(network: Prunable, weights: Mapping[str, Array], removed: Collection[int]) -> dict[str, Array]:
    """Return the weights of the whole network in which everything is 0 that ``shrink`` leaves out."""
    result = dict(weights)
    for name in network.layers:
        for array_name, keeps in _axes(network, name, weights, removed).items():
            if array_name.endswith((".running_mean", ".running_var")):
                continue
            array = weights[array_name].copy()
            for axis, kept in keeps:
                np.moveaxis(array, axis, 0)[~kept] = 0
            result[array_name] = array
    return result


def _axes(
    network: Prunable, name: str, weights: Mapping[str, Array], removed: Collection[int]
) -> dict[str, Sequence[tuple[int, Bools]]]:
    """Return (axis, which of its places stay) for each array of a layer that has channels."""
    layer = network.layers[name]
    kept_inputs, kept_outputs = network.what_stays(name, removed)
    if kept_inputs.all() and kept_outputs.all():
        return {}
    if layer.kind == "BatchNorm2d":
        parts = ("weight", "bias", "running_mean", "running_var")
        return {f"{name}.{part}": [(0, kept_outputs)] for part in parts}
    filters = kept_inputs[: len(kept_inputs) // layer.groups]  # the groups keep channels at the same places
    axes: dict[str, Sequence[tuple[int, Bools]]] = {f"{name}.weight": [(0, kept_outputs), (1, filters)]}
    if layer.depthwise:
        axes = {f"{name}.weight": [(0, kept_outputs)]}
    elif layer.kind == "ConvTranspose2d":
        axes = {f"{name}.weight": [(0, kept_inputs), (1, kept_outputs)]}
    return {**axes, **({f"{name}.bias": [(0, kept_outputs)]} if f"{name}.bias" in weights else {})}
