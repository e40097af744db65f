"""The private names of Keras 2.15 that mtrain uses, all in this file."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

TESTED = ("2.15.1",)
"""Versions of TensorFlow, with its own Keras, with which these internals were tested; see docs/versions.md."""
LEGACY = "legacy_stateful"
"""Kind of the random numbers of Keras's layers, unless ``tf.keras.backend.experimental.enable_tf_random_generator`` was called."""


def begin_at(model: Any, place: Callable[[], tuple[int, int]]) -> None:
    """Let the next ``model.fit`` begin at ``place()``: (epoch, batch of that epoch), as Keras does after a worker was lost."""

    def counters(steps_per_epoch: Any, initial_epoch: int) -> tuple[int, int]:
        epoch, position = place()
        return (epoch, position) if (epoch, position) > (initial_epoch, 0) else (initial_epoch, 0)

    # Keras calls it when `fit` begins, to go on where its own backup of a lost worker ends.
    model._maybe_load_initial_counters_from_ckpt = counters


def dataset_of(iterator: Any) -> Any:
    """Return the data set from which an iterator of TensorFlow was made; None where it does not say."""
    return getattr(iterator, "_dataset", None)


def generators(model: Any) -> Iterator[Any]:
    """Yield the variables with the states of ``tf.random.Generator``s in the layers of a model, in the order of the layers."""
    for layer in model._flatten_layers():
        own = getattr(getattr(layer, "_random_generator", None), "_generator", None)
        for generator in (own, *vars(layer).values()):
            if isinstance(generator, tf.random.Generator):
                yield generator.state


def without_state(model: Any) -> list[str]:
    """Return the names of layers, such as dropout, that draw from operations of the graph, whose counters nobody can read."""
    return [layer.name for layer in model._flatten_layers() if _draws(layer)]


def _draws(layer: Any) -> bool:
    kind = getattr(getattr(layer, "_random_generator", None), "_rng_type", None)
    rates = [getattr(layer, name) for name in ("rate", "dropout", "recurrent_dropout") if hasattr(layer, name)]
    # A layer with a rate of 0 draws nothing, so nothing of it can differ.
    return kind == LEGACY and (not rates or any(rate != 0 for rate in rates))


def make_slots(optimizer: Any, variables: list[Any]) -> None:
    """Make the variables of an optimizer, which would make them at its first step."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(variables)
