"""An update rule that is bound to one model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mtrain.core.interfaces.tensors import Array, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The learning rates and the momentum of one update, as the schedule sets them."""

    learning_rates: Sequence[float]
    """Learning rate of each group of the recipe, in its order."""
    momentum: float | None = None
    """Momentum (sgd, rmsprop) or beta1 (others) that replaces the one of every group; None: each group keeps its own."""
    sparsity: float | None = None
    """Share of each pruned array that is to be 0 after this update; None: the masks stay as they are."""


class Optimizer(Protocol):
    """An update rule bound to one model, with its loss scaling, gradient exchange between ranks, clipping and EMA."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The names of the parameters in each group of the recipe, in model order."""
        ...

    def micro_batch(self, *, last: bool, moves_buffers: bool = True) -> AbstractContextManager[None]:
        """Return a context that surrounds forward and backward of one micro batch.

        Args:
            last: It is the last micro batch of the update, in whose backward pass gradients are exchanged.
            moves_buffers: False: afterwards the buffers of the model, such as running statistics, are as they were.
        """
        ...

    def backward(self, loss: Tensor, *, retain_graph: bool = False, divisor: float = 1.0) -> None:
        """Add the gradient of ``loss``, divided by ``accumulate``, to what has been summed up so far.

        Args:
            loss: The mean over this micro batch.
            retain_graph: Another loss is computed from the same graph; only a user's script says so.
            divisor: Of the whole update, with its last micro batch: all its gradients are divided by it after the exchange, before
                the norm is taken. Only for a user's script that weighs micro batches is it not 1.
        """
        ...

    def step(self, rates: Rates, evaluate: Callable[[], float] | None = None) -> float:
        """Do one update: average over ranks, clip, apply, zero, EMA. Return the gradient norm before clipping.

        If the norm is not finite, weights, moments and EMA stay as they are, and that norm is returned.

        Args:
            rates: learning rates and momentum of the update.
            evaluate: only a user's script gives it, for an optimizer that computes loss and gradient as often as it likes. It
                computes them with the weights of now, and returns the mean loss over the ranks, by which all decide alike.
                Gradients are averaged and clipped each time; the first norm counts, and is returned.

        Raises:
            SpecError: ``evaluate`` is given, but the update rule computes the gradient once.
        """
        ...

    def gradients(self, loss: Tensor | None = None, *, retain_graph: bool = False) -> Mapping[str, Tensor]:
        """Return the gradients of the update in hands by name, as means over the ranks; every rank must call.

        Only a user's script calls it, after the last ``backward`` of the update. What it changes in them, ``step`` applies. With a
        ``loss``, its gradients are added as ``backward`` does, and a copy of them alone is returned.

        Raises:
            SpecError: The backend has no whole gradients.
        """
        ...

    def skip(self) -> float:
        """Drop the gradients of the update in hands, and return their norm; every rank must call. Nothing is counted."""
        ...

    def step_later(
        self, rates: Rates, numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> Callable[[], tuple[float, Array]]:
        """Do one update as ``step`` does, without waiting for the device; only where ``Capabilities.late`` is True.

        Args:
            rates: learning rates and momentum of the update.
            numbers: metrics of this rank that the host knows.
            tensors: metrics of this rank on the device, each of one element.

        Returns:
            A function that waits for the device, and returns the norm and the means over ranks of ``numbers`` and
            ``tensors``, float64. Call it after the next update was started, when the device has work to go on with.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model of every rank holds the EMA weights and the buffers of rank 0."""
        ...
