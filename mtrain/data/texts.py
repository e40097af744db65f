"""Many texts in two arrays instead of an object for each.

A million names take a fraction of the memory this way, and loader processes, which are forks of the rank, share them: Python writes
to an object's count of references whenever it is used, so each process would soon hold a copy of all small objects.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.data.lazy_rows import LazyRows

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by name, from which an object is made again in another process."""


class Texts(LazyRows[str]):
    """Texts in one array of bytes."""

    def __init__(self, arrays: Arrays) -> None:
        """Take the arrays ``ends`` (N + 1,) and ``content`` of others."""
        super().__init__(len(arrays["ends"]) - 1, self._text)
        self.arrays = arrays
        self._ends, self._content = arrays["ends"], arrays["content"]

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        """Keep texts, which are taken one after the other."""
        growing = GrowingTexts()
        for text in texts:
            growing.append(text)
        return growing.close()

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is a sequence of the same texts."""
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(own == its for own, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _text(self, index: int) -> str:
        content = self._content[self._ends[index] : self._ends[index + 1]]
        return content.tobytes().decode("utf-8", "surrogatepass")


class GrowingTexts:
    """Texts that are added one by one."""

    def __init__(self) -> None:
        self._content, self._ends = bytearray(), array("q", [0])

    def append(self, text: str) -> None:
        """Add a text."""
        self._content += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._content))

    def close(self) -> Texts:
        """Return all of them; none can be added afterwards."""
        ends, content = np.frombuffer(self._ends, np.int64), np.frombuffer(self._content, np.uint8)
        ends.setflags(write=False)
        content.setflags(write=False)
        return Texts({"ends": ends, "content": content})
