"""Images with boxes as a few large arrays instead of several small objects for each image.

A split of 117,000 images takes a fraction of the memory this way. What counts more: the loader's processes are forks of the
rank, and share its memory until they write to it. Python writes to an object's count of references whenever it is used, so
each process would soon hold a copy of all small objects; the content of a large array stays shared.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.data.texts import Arrays, Texts


class Ids:
    """The ids of images: an array where all are whole numbers of 64 bits, else texts in JSON."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._numbers = arrays.get("numbers")
        self._texts = None if self._numbers is not None else Texts(arrays)

    @classmethod
    def of(cls, ids: Sequence[int | str]) -> "Ids":
        """Keep ids."""
        if all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in ids):
            return cls({"numbers": np.array(ids, dtype=np.int64)})
        return cls(Texts.of(json.dumps(each) for each in ids).arrays)

    def __getitem__(self, index: int) -> int | str:
        """Return one id."""
        if self._numbers is not None:
            return int(self._numbers[index])
        assert self._texts is not None
        text: int | str = json.loads(self._texts[index])
        return text


class Ragged:
    """Arrays of different lengths, one after the other in one array."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._ends, self._content = arrays["ends"], arrays["content"]

    @classmethod
    def of(cls, parts: Sequence[NDArray[Any]], like: NDArray[Any]) -> "Ragged":
        """Keep arrays. ``like``: an empty array of the dtype and of the further axes, for no parts at all."""
        content = np.concatenate([like, *parts])
        content.setflags(write=False)
        return cls({"ends": np.cumsum([0, *map(len, parts)], dtype=np.int64), "content": content})

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return one part, a view that cannot be written to."""
        return self._content[self._ends[index] : self._ends[index + 1]]


def join_arrays(parts: Mapping[str, "Texts | Ids | Ragged | Places"]) -> dict[str, NDArray[Any]]:
    """Return the arrays of several objects by name, as in ``paths/ends``."""
    return {f"{name}/{key}": array for name, part in parts.items() for key, array in part.arrays.items()}


def within(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays of one of the objects that were ``join_arrays``."""
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}


class Places:
    """Path, id and size of images."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._paths, self._ids = Texts(within(arrays, "paths")), Ids(within(arrays, "ids"))
        self._sizes = arrays["sizes"]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "Places":
        """Keep those of ``rows``: anything with ``path``, ``image_id``, ``width`` and ``height``."""
        parts: dict[str, Texts | Ids | Ragged | Places] = {
            "paths": Texts.of(str(row.path) for row in rows),
            "ids": Ids.of([row.image_id for row in rows]),
        }
        sizes = np.array([(row.width, row.height) for row in rows], dtype=np.int64).reshape(-1, 2)
        return cls({**join_arrays(parts), "sizes": sizes})

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of one image, by name."""
        width, height = self._sizes[index].tolist()
        return {"path": Path(self._paths[index]), "image_id": self._ids[index], "width": width, "height": height}
