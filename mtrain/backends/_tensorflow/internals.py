"""The private names of Keras 2.15 that mtrain uses, all in this file."""

from collections.abc import Callable, Iterator
from typing import Any

TESTED = ("2.15.1",)
"""Versions of TensorFlow, with its own Keras, with which these internals were tested; see docs/versions.md."""


def begin_at(model: Any, place: Callable[[], tuple[int, int]]) -> None:
    """Let the next ``model.fit`` begin at ``place()``: (epoch, batch of that epoch), as Keras does after a worker was lost."""

    def counters(steps_per_epoch: Any, initial_epoch: int) -> tuple[int, int]:
        epoch, position = place()
        return (epoch, position) if (epoch, position) > (initial_epoch, 0) else (initial_epoch, 0)

    model._maybe_load_initial_counters_from_ckpt = counters


def dataset_of(iterator: Any) -> Any:
    """Return the data set from which an iterator of TensorFlow was made; None where it does not say."""
    return getattr(iterator, "_dataset", None)


def generators(model: Any) -> Iterator[Any]:
    """Yield the variables with the states of random layers, such as dropout, in the order of the layers."""
    for layer in model._flatten_layers():
        generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
        if generator is not None:
            yield generator.state


def make_slots(optimizer: Any, variables: list[Any]) -> None:
    """Make the variables of an optimizer, which would make them at its first step."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(variables)
