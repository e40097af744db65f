"""Training with weights and inputs of layers rounded to 8 bits (``train.quantise``), the same in every framework.

The weight of a layer is rounded per output channel, symmetrically: ``scale = max|weight| / 127``, integers -127..127. The
input is rounded per tensor to integers 0..255 over the range ``input_range`` of the layer, which always contains 0. Jacob
et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference", section 3.

A range is a moving average of the smallest and largest input of each *update*, over all its micro batches and ranks: the
ranks exchange one small vector per update, since a maximum is exact in any order. So all ranks round alike, and one rank
has the ranges that many have. The ranges are buffers of the model. They are not part of its average (EMA): an average
that began at unset ranges would cut values off for thousands of updates.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Array, Collective, Quantise, Recipe, State, Tensor
from mtrain.core.state.selected import Selected
from mtrain.errors import SpecError

RANGE = "input_range"
"""Name of a layer's buffer (2,): smallest and largest input; both 0: not set, so the layer computes without rounding."""
INPUT_LEVELS, WEIGHT_LIMIT = 255, 127
SHARE = 0.1
"""Share of the newest update in a range."""


def is_range(name: str) -> bool:
    """Return whether an entry of a model's state is the range of a layer."""
    return name.rpartition(".")[2] == RANGE


def find_ranges(weights: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    """Return the ranges that are set among the entries of a model's state, by the name of the layer."""
    ranges = {name.removesuffix(f".{RANGE}"): array for name, array in weights.items() if is_range(name)}
    return {name: (float(array[0]), float(array[1])) for name, array in ranges.items() if array[1] > array[0]}


class Quantised:
    """Base of layers that round weight and input. A framework's class derives from it and from the layer's own.

    ``follow_ranges`` sets the attributes.
    """

    input_range: Tensor
    observing: bool = False
    """Whether a forward pass in training looks at its input."""
    rounding: bool = False
    """Whether weight and input are rounded: the range is set."""
    seen: list[Tensor]
    """[-smallest, largest] input of each forward pass of this update."""
    training: bool

    def round_both(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return input and weight as the layer computes with them."""
        # Before rounding: a range is that of what the layer receives.
        if self.observing and self.training:
            self._look(ops.detach(x))
        if not self.rounding:
            return x, weight
        smallest, largest = self.input_range[0], self.input_range[1]
        scale = (largest - smallest) / INPUT_LEVELS
        rounded_x = ops.fake_quantise(x, scale, ops.round(-smallest / scale), low=0, high=INPUT_LEVELS)
        return rounded_x, round_weight(weight)

    def _look(self, x: Tensor) -> None:
        # The smallest is negated, so that one maximum over passes and ranks serves both bounds.
        bounds = ops.stack((-ops.min(x), ops.max(x)))
        # A list, because Paddle takes a tensor that is assigned to a layer for a part of its state.
        self.seen.append(ops.astype(bounds, ops.dtype(self.input_range)))


def round_weight(weight: Tensor) -> Tensor:
    """Round a weight (out, ...) per output channel to 255 values around 0."""
    values = ops.detach(weight)
    largest = ops.max(ops.abs(values), axis=tuple(range(1, len(ops.shape(values)))), keepdims=True)
    # A channel of zeros has no scale of its own, and stays zeros with any.
    scale = ops.where(largest > 0, largest, 1.0) / WEIGHT_LIMIT
    return ops.fake_quantise(weight, scale, ops.zeros((), like=scale), low=-WEIGHT_LIMIT, high=WEIGHT_LIMIT)


def choose_layers(names: Iterable[str], recipe: Recipe) -> set[str]:
    """Return those of the layers ``names``, all that can be rounded, that ``recipe`` rounds.

    Raises:
        SpecError: The model is a user's own, has no such layer, or a pattern of ``exclude`` names none.
    """
    assert recipe.quantise is not None
    if recipe.own_model:
        raise SpecError(OF_OWN_MODEL)
    names = list(names)
    if not names:
        raise SpecError(
            "train.quantise: the model has no convolution or linear layer of mtrain's; leave the section out"
        )
    for pattern in recipe.quantise.exclude:
        if not any(re.search(pattern, name) for name in names):
            raise SpecError(
                f"train.quantise.exclude: {pattern!r} is found in no layer's name; they are like {names[0]}"
            )
    chosen = {name for name in names if not any(re.search(pattern, name) for pattern in recipe.quantise.exclude)}
    if not chosen:
        raise SpecError("train.quantise.exclude: leaves no layer to round; exclude fewer, or leave the section out")
    return chosen


OF_OWN_MODEL = (
    "train.quantise: mtrain rounds the layers of its neutral models only, not those of a model of your own; leave the section "
    "out"
)


def fit_ranges(saved: State, names: Iterable[str]) -> State:
    """Return ``saved`` for a model whose entries are ``names``: with unset ranges where it has none, without others."""
    ranges = {name for name in names if is_range(name)}
    if not saved.weights or ranges == {name for name in saved.weights if is_range(name)}:
        return saved
    kept = {name: name for name in saved.weights if name in ranges or not is_range(name)}
    # A checkpoint of a job that rounded other layers, or none, lacks these ranges: they are learned anew.
    unset = {name: np.zeros(2, np.float32) for name in ranges - saved.weights.keys()}
    weights = Selected(saved.weights, kept, unset)
    return State(weights=weights, ema=saved.ema, moments=saved.moments, counters=saved.counters)


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Moves the ranges of a model's layers after each update; the same calls on all ranks."""

    layers: Mapping[str, Quantised]
    """The layers that are rounded, by name."""
    quantise: Quantise
    collective: Collective
    fill: Callable[[Mapping[str, Tensor], Mapping[str, Array]], None]
    """Copies arrays into tensors of the framework, by name."""

    def follow_restored(self, updates: int) -> None:
        """Follow ranges that were loaded into the model after ``updates`` updates."""
        values = ops.to_numpy(ops.stack([layer.input_range for layer in self.layers.values()]))
        for layer, (smallest, largest) in zip(self.layers.values(), values, strict=True):
            layer.rounding = bool(largest > smallest)
        self.begin(updates)

    def begin(self, updates: int) -> None:
        """Prepare the layers for the forward passes after ``updates`` updates."""
        observing = self._observes(updates)
        for layer in self.layers.values():
            layer.observing, layer.seen = observing, []

    def follow(self, updates: int) -> None:
        """Move the ranges by what update number ``updates``, from 1, has seen. Every rank must call."""
        if self._observes(updates - 1):
            self._move()
        self.begin(updates)

    def _observes(self, updates: int) -> bool:
        freeze = self.quantise.freeze
        return updates >= self.quantise.start and (freeze is None or updates < freeze)

    def _move(self) -> None:
        buffers = {name: layer.input_range for name, layer in self.layers.items()}
        unseen = ops.full((2,), -np.inf, like=next(iter(buffers.values())))
        parts = [ops.max(ops.stack([unseen, *layer.seen]), axis=0) for layer in self.layers.values()]
        both = ops.to_numpy(ops.stack([*parts, *buffers.values()]))
        seen = self.collective.all_reduce(both[: len(parts)].copy(), "max")
        moved = {}
        for name, new, old in zip(buffers, seen, both[len(parts) :], strict=True):
            # Still infinite: no pass of any rank has reached this layer in the update.
            if np.isfinite(new).all():
                moved[name] = move_range(old, new)
        self.fill({name: buffers[name] for name in moved}, moved)
        for name, values in moved.items():
            self.layers[name].rounding = bool(values[1] > values[0])


def move_range(old: Array, seen: Array) -> Array:
    """Return the range [smallest, largest] after an update that saw ``seen``, [-smallest, largest]; 0 is inside."""
    new = np.array([-max(seen[0], 0), max(seen[1], 0)], dtype=old.dtype)
    # An unset range takes the first one whole: averaged with zeros it would cut values off for long.
    if not old.any():
        return new
    share = old.dtype.type(SHARE)
    return np.asarray(old + share * (new - old))
