"""Arrays of another mapping under other names, which are fetched when they are used: it may read them from a file."""

from collections.abc import Iterator, Mapping

from mtrain.core.interfaces import Array
from mtrain.core.overriding import override


class Selected(Mapping[str, Array]):
    """Some of the arrays of ``arrays`` under names of their own, and ``further`` ones."""

    def __init__(
        self, arrays: Mapping[str, Array], names: Mapping[str, str], further: Mapping[str, Array] | None = None
    ) -> None:
        """Select arrays; ``names`` maps their names to those that they have in ``arrays``."""
        self._arrays = arrays
        self._names = dict(names)
        self._further = dict(further or {})

    @override
    def __getitem__(self, name: str) -> Array:
        return self._further[name] if name in self._further else self._arrays[self._names[name]]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter({**self._names, **self._further})

    @override
    def __len__(self) -> int:
        return len({**self._names, **self._further})
