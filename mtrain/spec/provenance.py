"""Merge values from several sources, and record for each where it came from and which values it replaced."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.spec.addresses import mask
from mtrain.spec.yaml_reader import Path, nearest

Kind = Literal["default", "plugins", "base", "file", "environment", "run", "override", "flag"]
"""Kinds of sources, from the weakest to the strongest."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was set.

    ``text`` is the text that set it, if that was not a line of a spec: ``-o a.b=1``, ``MTRAIN_A__B=1``, ``--flag 1``, or the
    place and the key in a file of another project.
    """

    kind: Kind
    file: str | None = None
    line: int | None = None
    text: str = ""
    level: int = field(default=0, compare=False, repr=False)
    """Number of the layer that set the value, from 1 for the weakest; 0: a default."""

    def __str__(self) -> str:
        if self.file is None or self.text:
            return mask(self.text) or self.kind
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Misplaced(Exception):
    """Raised if a path leads through a value that has no keys, or past the end of a list."""


@dataclass(slots=True)
class Layers:
    """Values of a spec, built up from the weakest source to the strongest.

    A mapping is merged into the one of weaker sources; any other value replaces the weaker one.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    history: dict[Path, list[tuple[Any, Origin]]] = field(default_factory=dict)
    level: int = 0
    """Number of the current layer, which the origins of its values have; every layer is stronger than those before."""

    def begin(self) -> None:
        """Start the next layer."""
        self.level += 1

    def is_set(self, path: Path) -> bool:
        """Return whether a layer has set the value at ``path``, be it to null."""
        return path in self.origins

    def number(self, path: Path) -> int:
        """Return the level of the value at ``path``; higher is stronger. -1: it was not set."""
        return self.origins[path].level if self.is_set(path) else -1

    def is_touched(self, path: Path) -> bool:
        """Return whether the current layer has set the value at ``path``."""
        return self.number(path) == self.level

    def merge(self, values: Mapping[str, Any], origin_at: Callable[[Path], Origin], path: Path = ()) -> None:
        """Merge ``values`` into the mapping at ``path``."""
        self._merge(self._at(path), values, origin_at, path)

    def assign(self, path: Path, value: Any, origin: Origin, defaults: Mapping[str, Any]) -> None:
        """Set one value. Numbers in ``path`` are positions in lists; a list not set so far starts as its default.

        Raises: ``Misplaced`` if the path cannot be followed.
        """
        container: Any = self.values
        for position, key in enumerate(path[:-1]):
            container = self._step(container, key, path[: position + 1], origin, defaults)
        last = path[-1]
        if isinstance(container, list):
            index = _index(container, last, path)
            real = (*path[:-1], index)
            if isinstance(value, dict) and isinstance(container[index], dict):
                self._merge(container[index], value, lambda _: origin, real)
            else:
                self._replace(container, real, value, lambda _: origin)
        else:
            self._merge(container, {str(last): value}, lambda _: origin, path[:-1])

    def drop(self, path: Path) -> None:
        """Remove the value at ``path``, whose container must be a mapping."""
        self._at(path[:-1]).pop(str(path[-1]), None)
        for below in [other for other in self.origins if other[: len(path)] == path]:
            del self.origins[below]

    def origin(self, path: Path) -> Origin:
        """Return the origin of the value at ``path``, or else of the nearest section around it."""
        return nearest(path, self.origins) or Origin("default")

    def get(self, path: Path) -> Any:
        """Return the value that was set at ``path``; None if none was."""
        return lookup(self.values, path)

    def choices(self, path: Path) -> list[tuple[Any, Origin]]:
        """Return every value that ``path`` had and the one that it has, with their origins, the weakest first."""
        chosen = self.get(path)
        return [*self.history.get(path, ()), *([] if chosen is None else [(chosen, self.origin(path))])]

    def _at(self, path: Path) -> dict[str, Any]:
        current: Any = self.values
        for key in path:
            if not isinstance(current.get(key), dict):
                current[key] = {}
            current = current[key]
        return current  # type: ignore[no-any-return]

    def _merge(self, into: Any, values: Mapping[str, Any], origin_at: Callable[[Path], Origin], path: Path) -> None:
        for key, value in values.items():
            here = (*path, key)
            if isinstance(value, dict) and (isinstance(into.get(key), dict) or into.get(key) is None):
                if into.get(key) is None:
                    into[key] = {}
                self.origins[here] = origin_at(here)
                self._merge(into[key], value, origin_at, here)
            else:
                self._replace(into, here, value, origin_at)

    def _replace(self, container: Any, path: Path, value: Any, origin_at: Callable[[Path], Origin]) -> None:
        key: Any = path[-1]
        if isinstance(container, list) or key in container:  # A search for every new key would take quadratic time.
            self.history.setdefault(path, []).append((container[key], self.origin(path)))
            for below in [other for other in self.origins if other[: len(path)] == path]:
                del self.origins[below]
        # A copy, because later layers change values in place, and a spec in Python is the caller's.
        container[key] = deepcopy(value)
        self._note(value, origin_at, path)

    def _note(self, value: Any, origin_at: Callable[[Path], Origin], path: Path) -> None:
        """Record the origin of ``value`` and of everything inside it."""
        self.origins[path] = origin_at(path)
        children: Sequence[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, list):
            children = list(enumerate(value))
        for key, child in children:
            self._note(child, origin_at, (*path, key))

    def _step(self, container: Any, key: str | int, path: Path, origin: Origin, defaults: Mapping[str, Any]) -> Any:
        if isinstance(container, list):
            return container[_index(container, key, path)]
        if not isinstance(container, dict):
            raise Misplaced(f"{_dot(path[:-1])} is {container!r}, which has no keys")
        key = str(key)
        if container.get(key) is None:
            default = lookup(defaults, path)
            container[key] = deepcopy(default) if isinstance(default, list) else {}
            self.origins.setdefault(path, origin)
        if not isinstance(container[key], dict | list):
            raise Misplaced(f"{_dot(path)} is {container[key]!r}, which has no keys")
        return container[key]


def lookup(values: Any, path: Path) -> Any:
    """Return the value at ``path`` in nested ``values``; None if the path does not exist."""
    for key in path:
        if isinstance(values, Mapping):
            values = values.get(key)
        elif isinstance(values, list) and str(key).isdigit() and int(key) < len(values):
            values = values[int(key)]
        else:
            return None
    return values


def _index(items: list[Any], key: str | int, path: Path) -> int:
    if not str(key).isdigit() or int(key) >= len(items):
        raise Misplaced(f"{_dot(path[:-1])} is a list of {len(items)}; use 0 to {len(items) - 1}, not {key!r}")
    return int(key)


def _dot(path: Path) -> str:
    return ".".join(map(str, path))
