"""Score how important each set of channels is: by the scale of BatchNorm, by the size of filters, or by a Taylor expansion."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import UsageError
from mtrain_deploy.pruning import By
from mtrain_deploy.pruning.network import Prunable

Gradients: TypeAlias = Callable[[], Iterator[Mapping[str, Array]]]
"""Returns the gradients of some updates, each by name of the parameter."""


def scores_of(network: Prunable, weights: Mapping[str, Array], by: By, gradients: Gradients) -> dict[int, float]:
    """Return the importance of each set that can be removed; sets that the criterion does not cover are left out.

    bn: the mean absolute scale of the BatchNorms over the set's channels (Liu et al. 2017, arXiv 1708.06519).
    l1: the mean absolute weight of the set's filters, divided by the mean of its group (Li et al. 2017, arXiv 1608.08710;
    the division makes groups comparable).
    taylor: the square of the sum of weight times gradient over the scale and shift of the set's BatchNorms, or over its
    filters where there is none, averaged over updates (Molchanov et al. 2019, arXiv 1906.10771, equation 8).

    Raises:
        UsageError: nothing can be removed, or the criterion covers no set.
    """
    groups = network.groups
    if not groups:
        raise UsageError("this model has no channels that can be removed: all of them reach an output or an own array")
    if by == "l1":
        scores = _mean_absolute(network, weights, norms=False)
        for group in groups:
            known = [number for number in group.sets if number in scores]
            # Layers have weights of other sizes: without the division whole layers would go first.
            mean = float(np.mean([scores[number] for number in known])) or 1.0
            scores.update({number: scores[number] / mean for number in known})
    elif by == "bn":
        scores = _mean_absolute(network, weights, norms=True)
    else:
        scores = _taylor(network, weights, gradients)
    removable = {number for group in groups for number in group.sets}
    scores = {number: score for number, score in scores.items() if number in removable}
    if not scores:
        raise UsageError("--by bn: no channels that can be removed go through a BatchNorm; use --by l1 or --by taylor")
    return scores


def _mean_absolute(network: Prunable, weights: Mapping[str, Array], *, norms: bool) -> dict[int, float]:
    """Return the mean absolute value of scales, or with ``norms=False`` of filters, over the members of each set."""
    values: dict[int, list[float]] = {}
    for name, ids in _writers(network, norms=norms):
        rows = _rows(network, name, weights[f"{name}.weight"])
        for number, value in zip(ids, np.abs(rows).mean(axis=1), strict=True):
            values.setdefault(int(number), []).append(float(value))
    return {number: float(np.mean(members)) for number, members in values.items()}


def _taylor(network: Prunable, weights: Mapping[str, Array], gradients: Gradients) -> dict[int, float]:
    normalised = {int(number) for _, ids in _writers(network, norms=True) for number in ids}
    totals: dict[int, float] = {}
    for update in gradients():
        sums: dict[int, float] = {}
        for norms in (True, False):
            for name, ids in _writers(network, norms=norms):
                products = _products(network, name, weights, update)
                for number, value in zip(ids, products, strict=True):
                    if norms or int(number) not in normalised:
                        sums[int(number)] = sums.get(int(number), 0.0) + float(value)
        for number, value in sums.items():
            totals[number] = totals.get(number, 0.0) + value**2
    return totals


def _products(network: Prunable, name: str, weights: Mapping[str, Array], update: Mapping[str, Array]) -> Array:
    """Return the sum of weight times gradient of each output channel of a layer; 0 for weights that are not trained."""
    total = np.zeros(len(network.outputs[name]))
    for part in ("weight", "bias"):
        array = f"{name}.{part}"
        if array in weights and array in update:
            total += _rows(network, name, weights[array].astype(np.float64) * update[array]).sum(axis=1)
    return total


def _writers(network: Prunable, *, norms: bool) -> Iterator[tuple[str, Array]]:
    """Yield name and sets of the BatchNorms, or with ``norms=False`` of the layers that write channels."""
    for name, layer in network.layers.items():
        if (layer.kind == "BatchNorm2d") == norms:
            yield name, network.outputs[name]


def _rows(network: Prunable, name: str, array: Array) -> Array:
    """Return an array of a layer as one row for each of its output channels."""
    if network.layers[name].kind == "ConvTranspose2d" and array.ndim > 1:
        array = np.moveaxis(array, 1, 0)
    return array.reshape(len(network.outputs[name]), -1)
