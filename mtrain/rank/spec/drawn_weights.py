"""Start weights of mtrain's own models, drawn one by one when they are read, so that no rank holds them all."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np

from mtrain.core.interfaces import Array, Model, Task
from mtrain.core.network.quantising import is_range
from mtrain.core.overriding import override
from mtrain.errors import PluginError

T = TypeVar("T")


class DrawnWeights(Mapping[str, Array]):
    """The start values of a model, each drawn by (seed, name) when it is accessed."""

    def __init__(self, plugin: Model, task: Task, shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> None:
        """Draw from ``plugin``; ``shapes``: those of the model's whole state."""
        self.shapes = dict(shapes)
        self._plugin = plugin
        self._task = task
        self._seed = seed
        self._drawn = {name: shape for name, shape in shapes.items() if not is_range(name)}

    @override
    def __getitem__(self, name: str) -> Array:
        shape = self.shapes[name]
        if is_range(name):
            return np.zeros(shape, np.float32)
        # The model draws each array by (seed, name), so one alone has the values that it has among all.
        drawn = self._plugin.initial(_Only(self._drawn, name), self._task, seed=self._seed)[name]
        if drawn.shape != shape:
            raise PluginError(
                f"{type(self._plugin).__name__}.initial returned {name} of shape {drawn.shape}; expected {shape}"
            )
        return drawn

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    @override
    def __len__(self) -> int:
        return len(self.shapes)


class _Only(Mapping[str, T]):
    """All entries of a mapping, of which going through it shows a single one: the value of a bias may need its weight's shape."""

    def __init__(self, entries: Mapping[str, T], name: str) -> None:
        self._entries = entries
        self._name = name

    @override
    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter([self._name])

    @override
    def __len__(self) -> int:
        return 1
