"""Images with boxes as a few large arrays instead of several small objects for each image.

A split of 117,000 images takes a fraction of the memory this way. What counts more: the loader's processes are forks of the
rank, and share its memory until they write to it. Python writes to an object's count of references whenever it is used, so
each process would soon hold a copy of all small objects; the content of a large array stays shared.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row")


class Texts:
    """Many texts in one array of bytes."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._content = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __getitem__(self, index: int) -> str:
        """Return one text."""
        content = self._content[self._ends[index] : self._ends[index + 1]]
        return content.tobytes().decode("utf-8", "surrogatepass")


class Ids:
    """The ids of images: an array where all are whole numbers of 64 bits, else a list."""

    def __init__(self, ids: Sequence[int | str]) -> None:
        is_small = all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in ids)
        self._array = np.array(ids, dtype=np.int64) if is_small else None
        self._list = () if is_small else tuple(ids)

    def __getitem__(self, index: int) -> int | str:
        """Return one id."""
        return self._list[index] if self._array is None else int(self._array[index])


class Ragged:
    """Arrays of different lengths, one after the other in one array."""

    def __init__(self, parts: Sequence[NDArray[Any]], like: NDArray[Any]) -> None:
        """``like``: an empty array of the dtype and of the further axes, for no parts at all."""
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._content = np.concatenate([like, *parts])
        self._content.setflags(write=False)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return one part, a view that cannot be written to."""
        return self._content[self._ends[index] : self._ends[index + 1]]


class Table(Sequence[Row], Generic[Row]):
    """A sequence of images that makes each from arrays when it is asked for."""

    def __init__(self, length: int, make: Callable[[int], Row]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Return one image, or a list of several.

        Raises:
            IndexError: there is none.
        """
        if isinstance(index, slice):
            return [self._make(each) for each in range(self._length)[index]]
        return self._make(range(self._length)[index])


class Places:
    """Path, id and size of images."""

    def __init__(self, rows: Sequence[Any]) -> None:
        """``rows``: anything with ``path``, ``image_id``, ``width`` and ``height``."""
        self._paths = Texts(str(row.path) for row in rows)
        self._ids = Ids([row.image_id for row in rows])
        self._sizes = np.array([(row.width, row.height) for row in rows], dtype=np.int64).reshape(-1, 2)

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of one image, by name."""
        width, height = self._sizes[index].tolist()
        return {"path": Path(self._paths[index]), "image_id": self._ids[index], "width": width, "height": height}
