"""A sequence whose elements are made when they are asked for."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

Row = TypeVar("Row")


class LazyRows(Sequence[Row], Generic[Row]):
    """Makes each element from what somebody else keeps, such as a few large arrays."""

    def __init__(self, length: int, make: Callable[[int], Row]) -> None:
        """``make``: returns the element of a number from 0 to ``length`` - 1."""
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Return one element, or a list of several.

        Raises:
            IndexError: there is none.
        """
        if isinstance(index, slice):
            return [self._make(each) for each in range(self._length)[index]]
        return self._make(range(self._length)[index])
