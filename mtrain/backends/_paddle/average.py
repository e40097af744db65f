"""Exponential moving average of weights and float buffers."""

from collections.abc import Callable, Sequence

import paddle
from paddle import Tensor

from mtrain.backends._paddle.flat import Flat
from mtrain.backends._paddle.kernels import add_


class Average:
    """Shadow of the tensors ``live``; they trade contents for evaluation, so that each tensor keeps its memory."""

    def __init__(
        self, names: Sequence[str], live: Sequence[Flat], shares: Callable[[int], tuple[float, float]]
    ) -> None:
        """``names``: the order of the model; ``shares``: (keep, take) behind an update, see ``core.recipe.ema_shares``."""
        self._names = names
        self._pairs = [(flat.copy(), flat) for flat in live]
        self._shares = shares

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name."""
        found = {name: tensor for shadow, _ in self._pairs for name, tensor in shadow.tensors.items()}
        return {name: found[name] for name in self._names}

    def follow(self, update: int) -> None:
        """shadow = keep * shadow + take * live, behind update ``update`` (1-based)."""
        keep, take = self._shares(update)
        for shadow, live in self._pairs:
            shadow.buffer.scale_(keep)
            add_(shadow.buffer, take, live.buffer)

    def restart(self) -> None:
        """shadow = live."""
        for shadow, live in self._pairs:
            paddle.assign(live.buffer, shadow.buffer)

    def swap(self) -> None:
        """Trade the contents of shadow and live."""
        for shadow, live in self._pairs:
            inside = live.buffer.clone()
            paddle.assign(shadow.buffer, live.buffer)
            paddle.assign(inside, shadow.buffer)
