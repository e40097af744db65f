"""Zeros and an L1 penalty while training: what ``train.prune`` does after the update rule, on every framework.

A mask is an array of 0 and 1 for each pruned weight. It is kept with the moments of the optimizer, as ``mask/<name>``, so
that checkpoints hold it and a resumed job continues with it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from mtrain.core.interfaces import Pruning, Rates

Tensor = TypeVar("Tensor")
MASK = "mask"
"""Name of the moment that holds a mask."""


class Masking(ABC, Generic[Tensor]):
    """The masks of a model. A framework supplies the four operations on tensors."""

    def __init__(self, pruning: Pruning, groups: Sequence[Mapping[str, Tensor]], state: Collection[str]) -> None:
        """Make masks of ones.

        Args:
            pruning: the setting of the recipe.
            groups: trained parameters by name, for each group of the recipe.
            state: names of the model's whole state.
        """
        self._l1 = pruning.norm_l1
        self._weights: dict[str, Tensor] = {
            name: tensor
            for group in groups
            for name, tensor in group.items()
            if pruning.sparsity and _axes(tensor) >= 2 and re.search(pruning.match, name)
        }
        self.masks: dict[str, Tensor] = {name: self._ones(tensor) for name, tensor in self._weights.items()}
        """Mask of each pruned weight, by its name."""
        scales = [[tensor for name, tensor in group.items() if _is_scale(name, state)] for group in groups]
        self._scales = scales if self._l1 else [[] for _ in groups]

    def follow(self, rates: Rates) -> None:
        """Shrink scales and set weights to 0 after an update; ``rates``: those of the update."""
        for tensors, learning_rate in zip(self._scales, rates.learning_rates, strict=True):
            for tensor in tensors:
                self._soften(tensor, learning_rate * self._l1)
        for name, tensor in self._weights.items():
            self._multiply(tensor, self.masks[name])
            if rates.sparsity is not None:  # chosen among weights whose zeros are zeros, so that these stay
                self._choose(self.masks[name], tensor, rates.sparsity)
                self._multiply(tensor, self.masks[name])

    def follow_average(self, averages: Mapping[str, Tensor]) -> None:
        """Set the same elements of averaged weights to 0."""
        for name, mask in self.masks.items():
            if name in averages:
                self._multiply(averages[name], mask)

    def moments(self) -> dict[str, Tensor]:
        """Return the live masks under the names of ``State.moments``."""
        return {f"{MASK}/{name}": mask for name, mask in self.masks.items()}

    @abstractmethod
    def _ones(self, tensor: Tensor) -> Tensor:
        """Return ones in the shape, type and layout of ``tensor``."""

    @abstractmethod
    def _choose(self, mask: Tensor, weight: Tensor, share: float) -> None:
        """Set ``mask`` to 0 where the absolute weight is among the ``share`` smallest, else to 1.

        Weights equal to the largest of these are 0 too, so that the choice does not depend on an order.
        """

    @abstractmethod
    def _multiply(self, tensor: Tensor, mask: Tensor) -> None:
        """Multiply ``tensor`` by ``mask`` in place."""

    @abstractmethod
    def _soften(self, tensor: Tensor, amount: float) -> None:
        """Move each element towards 0 by ``amount`` in place, at most to 0."""


def _axes(tensor: Any) -> int:
    return len(tensor.shape)


def _is_scale(name: str, state: Collection[str]) -> bool:
    """Return whether a parameter is the scale of a BatchNorm, which alone has running statistics."""
    stem, _, leaf = name.rpartition(".")
    return leaf == "weight" and f"{stem}.running_var" in state
