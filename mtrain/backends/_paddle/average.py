"""Exponential moving average of weights and float buffers."""

from collections.abc import Callable, Mapping, Sequence

import paddle
from paddle import Tensor

from mtrain.backends._paddle.flat import Flat
from mtrain.backends._paddle.internals import add_


class Average:
    """Moving average ("shadow") of the tensors ``live``; for evaluation the two swap contents, not memory."""

    def __init__(
        self,
        names: Sequence[str],
        live: Sequence[Flat],
        shares: Callable[[int], tuple[float, float]],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Start the average at the current values of ``live``.

        Args:
            names: Names of the averaged tensors in the order of the model.
            live: The model's own tensors; they keep changing as it trains.
            shares: Maps the number of an update to (keep, take), see ``core.update.recipe.ema_shares``.
            aliases: Further names of tied tensors: alias -> name.
        """
        self._aliases = aliases or {}
        self._names = names
        self._pairs = [(flat.copy(), flat) for flat in live]
        self._shares = shares
        self._remembered: dict[int, Tensor] = {}

    def remember(self) -> None:
        """Copy the buffers, which forward passes change before ``follow`` is called for the update just made."""
        self._remembered = {
            i: live.buffer.clone()
            for i, (_, live) in enumerate(self._pairs)
            if all(tensor.stop_gradient for tensor in live.tensors.values())
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name, in the order of the model."""
        averages = {name: tensor for shadow, _ in self._pairs for name, tensor in shadow.tensors.items()}
        ordered = {name: averages[name] for name in self._names}
        return ordered | {alias: averages[name] for alias, name in self._aliases.items()}

    def follow(self, update: int) -> None:
        """Fold the weights of update ``update`` (1-based) in: shadow = keep * shadow + take * live."""
        keep, take = self._shares(update)
        for i, (shadow, live) in enumerate(self._pairs):
            shadow.buffer.scale_(keep)
            add_(shadow.buffer, take, self._remembered.get(i, live.buffer))
        self._remembered = {}

    def restart(self) -> None:
        """Set the average to the current weights: shadow = live."""
        for shadow, live in self._pairs:
            paddle.assign(live.buffer, shadow.buffer)

    def swap(self) -> None:
        """Exchange the contents of shadow and live by copying."""
        for shadow, live in self._pairs:
            live_values = live.buffer.clone()
            paddle.assign(shadow.buffer, live.buffer)
            paddle.assign(live_values, shadow.buffer)
