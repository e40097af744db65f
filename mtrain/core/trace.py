"""What the ranks of a job tell after every update so that jobs can be compared: digests, and sketches that are linear.

Two jobs whose digests are equal have the same bits. Where they differ, sketches tell by how much and in which direction: the sketch
of a difference is the difference of the sketches, so a factor or a lost term is found without keeping the arrays of every update.
"""

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.digest import digest
from mtrain.core.interfaces import Array, Collective, HostBatch, Loader, State
from mtrain.core.traffic import sent_bytes

SIZE = 32
"""Numbers in a sketch: lengths of differences come out within an eighth or so."""
DIGITS = 16
"""Hex digits that are kept of a digest."""


class Sketcher:
    """Adds the elements of arrays, each with a sign that depends on name and place, into ``SIZE`` sums.

    Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams", section 3.1: the sum of the squares has the
    squared length of the arrays as its expectation.
    """

    def __init__(self) -> None:
        self._signs: dict[str, Array] = {}

    def sketch(self, arrays: Mapping[str, Array]) -> Array:
        """(SIZE,) float64. Arrays of one name get the same signs, whatever they are; those of whole numbers are left out."""
        total = np.zeros(SIZE)
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                continue
            signed = np.zeros(-(-array.size // SIZE) * SIZE)
            np.multiply(np.ravel(array), self._signs_of(name, array.size), out=signed[: array.size])
            total += signed.reshape(-1, SIZE).sum(axis=0)
        return total

    def _signs_of(self, name: str, count: int) -> Array:
        if name not in self._signs:
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            self._signs[name] = generator.integers(0, 2, count, dtype=np.int8) * 2 - 1
        return self._signs[name]


def parts(state: State, groups: Sequence[Sequence[str]]) -> dict[str, dict[str, Array]]:
    """The arrays of a job's state by what they are: ``weights/<group>``, ``<moment>/<group>``, ``buffers`` (with what is not
    trained) and ``ema``; inside by the name of the weight. Parts without arrays are left out."""
    places = {name: i for i, names in enumerate(groups) for name in names}
    found: dict[str, dict[str, Array]] = {
        f"weights/{i}": {name: state.weights[name] for name in names} for i, names in enumerate(groups)
    }
    for key, array in state.moments.items():
        moment, _, name = key.partition("/")
        found.setdefault(f"{moment}/{places[name]}", {})[name] = array
    found["buffers"] = {name: array for name, array in state.weights.items() if name not in places}
    found["ema"] = dict(state.ema)
    return {name: arrays for name, arrays in found.items() if arrays}


class Tracer:
    """One rank's part in the trace of a job. Everything but ``watch`` is collective."""

    def __init__(
        self, collective: Collective, groups: Sequence[Sequence[str]], state: Callable[[], State], *, accumulate: int
    ) -> None:
        """``state`` gives the job's state; ``groups`` are the names of trained weights by group."""
        self._collective = collective
        self._groups = groups
        self._state = state
        self._accumulate = accumulate
        self._sketcher = Sketcher()
        self._seen: deque[str] = deque()

    def watch(self, loader: Loader) -> Loader:
        """The same loader; what it gives is remembered for ``after_update``."""
        return _Watched(loader, self._seen)

    def look(self) -> dict[str, Any]:
        """``digests`` and ``sketches`` of each part of the job's state, and whether all ranks hold the same (``ranks_agree``)."""
        found = parts(self._state(), self._groups)
        digests = {name: digest(arrays)[:DIGITS] for name, arrays in found.items()}
        trained = [value for name, value in digests.items() if name.startswith("weights/")]
        return {
            "digests": digests,
            "sketches": {name: self._sketcher.sketch(arrays).tolist() for name, arrays in found.items()},
            "ranks_agree": len(set(map(tuple, self._collective.all_gather(trained)))) == 1,
        }

    def after_update(self) -> dict[str, Any]:
        """``look``, and ``samples``: a digest of what all ranks were given for the update that has just been run."""
        mine = [self._seen.popleft() for _ in range(self._accumulate)]
        given = self._collective.all_gather(mine)
        order = [given[rank][turn] for turn in range(self._accumulate) for rank in range(len(given))]
        return {"samples": hashlib.sha256("".join(order).encode()).hexdigest()[:DIGITS], **self.look()}


class _Watched:
    """A loader that leaves digests of its micro batches behind, those prepared ahead included."""

    def __init__(self, inside: Loader, seen: deque[str]) -> None:
        self._inside = inside
        self._seen = seen
        self.updates_per_epoch = inside.updates_per_epoch

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        self._seen.clear()
        for batch in self._inside.micro_batches(epoch, start):
            self._seen.append(digest(batch))
            yield batch

    def close(self) -> None:
        self._inside.close()


class Shares:
    """Of each update of one rank, the share of its time in which the rank waited for others."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._found: list[float] = []

    def take(self, record: Mapping[str, Any]) -> None:
        """The record of an update, with ``communication_s`` where the backend tells it; the first one is only a beginning."""
        total = record.get("communication_s")
        if total is not None and self._before is not None:
            self._found.append(min(1.0, (total - self._before) / record["seconds"]))
        self._before = total

    def told(self) -> dict[str, float]:
        """``communication_share``, the median of updates; nothing where the backend did not tell."""
        return {"communication_share": float(np.median(self._found))} if self._found else {}


def traffic() -> dict[str, int]:
    """``sent_bytes`` of this process so far, where the kernel tells."""
    sent = sent_bytes()
    return {} if sent is None else {"sent_bytes": sent}
