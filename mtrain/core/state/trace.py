"""Record digests and linear sketches of a job's state after every update, so that jobs can be compared.

If the digests of two jobs are equal, so are all bits. If they differ, the sketches show by how much and in which
direction: the sketch of a difference is the difference of the sketches. So a wrong factor or a lost term can be found
without storing the arrays of every update.
"""

import array as compact
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Array, Collective, HostBatch, Loader, State
from mtrain.core.ranks.traffic import sent_bytes
from mtrain.core.state.digest import digest
from mtrain.core.state.named_models import models_in
from mtrain_trace import mixing

SIZE = mixing.LENGTH
"""Numbers in a sketch."""
MOST_SHARES = 4096
"""Updates from which the median of the waiting is taken."""
DIGITS = 16
"""Hexadecimal digits of a digest that are recorded."""


def sketch_of(arrays: Mapping[str, Array]) -> Array:
    """Return the sketch of float arrays, (SIZE,) float64, as ``mtrain_trace`` makes it. Integer arrays are left out.

    The signs depend only on the name of an array and the place in it, so sketches of different jobs can be subtracted.
    """
    sketches = [mixing.sketch(array, name) for name, array in arrays.items() if array.dtype.kind == "f"]
    total: Array = np.sum(sketches, axis=0) if sketches else np.zeros(SIZE)
    return total


def digest_of(arrays: Mapping[str, Array]) -> str:
    """Return the digest of arrays as ``mtrain_trace`` makes it: the sum of the digests of all."""
    return f"{sum(mixing.digest(array, name) for name, array in arrays.items()) & mixing.MASK:0{DIGITS}x}"


def parts(state: State, groups: Sequence[Sequence[str]]) -> dict[str, dict[str, Array]]:
    """Sort the arrays of a job's state into parts, each a mapping by the name of the weight.

    The parts are ``weights/<group>``, ``<moment>/<group>``, ``buffers`` (with weights that are not trained) and
    ``ema``; of several models ``buffers/<model>`` and ``ema/<model>``. Parts without arrays are left out.
    """
    places = {name: i for i, names in enumerate(groups) for name in names}
    parts_by_name: dict[str, dict[str, Array]] = {
        f"weights/{i}": {name: state.weights[name] for name in names} for i, names in enumerate(groups)
    }
    for key, array in state.moments.items():
        moment, _, name = key.partition("/")
        parts_by_name.setdefault(f"{moment}/{places[name]}", {})[name] = array
    parts_by_name |= _by_model("buffers", {name: x for name, x in state.weights.items() if name not in places})
    parts_by_name |= _by_model("ema", state.ema)
    return {name: arrays for name, arrays in parts_by_name.items() if arrays}


def _by_model(part: str, arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Divide a part among several models."""
    found: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        (model,) = models_in([name])
        found.setdefault(f"{part}/{model}" if model else part, {})[name] = array
    return found


class Tracer:
    """Records the trace of a job on one rank. Every rank must call its methods, except ``watch`` and ``saw``."""

    def __init__(
        self,
        collective: Collective,
        groups: Sequence[Sequence[str]],
        state: Callable[[], State],
        *,
        accumulate: int,
        readers: Sequence[int] | None = None,
    ) -> None:
        """Make the tracer of a rank.

        Args:
            collective: The ranks.
            groups: Names of the trained weights by group.
            state: Returns the job's state.
            accumulate: Micro batches of a rank in an update.
            readers: The ranks that together have the samples of an update once; None: all of them.
        """
        self._decided: list[Any] | None = None
        self._readers = readers
        self._collective = collective
        self._groups = groups
        self._state = state
        self._accumulate = accumulate
        self._batch_digests: deque[str] = deque()

    def watch(self, loader: Loader, *, decided: list[Any] | None = None) -> Loader:
        """Return a loader with the same micro batches that also records their digests for ``after_update``.

        ``decided``: receives a tensor (B, ...) of each micro batch, see ``models.common.imitation.Imitator``; None: nothing is.
        """
        self._decided = decided
        return _WatchedLoader(loader, self._batch_digests)

    def saw(self, batch: HostBatch) -> None:
        """Record the digest of this rank's next micro batch, for a loop without a ``Loader``."""
        self._batch_digests.append(digest(batch))

    def saw_more(self, batch: HostBatch) -> None:
        """Add further arrays to the micro batch that was seen last."""
        self._batch_digests[-1] = hashlib.sha256(f"{self._batch_digests[-1]}{digest(batch)}".encode()).hexdigest()

    def look(self) -> dict[str, Any]:
        """Return ``digests`` and ``sketches`` of each part of the job's state, and ``ranks_agree``.

        ``ranks_agree``: whether all ranks hold the same weights.
        """
        state_parts = parts(self._state(), self._groups)
        digests = {name: digest_of(arrays) for name, arrays in state_parts.items()}
        # Buffers such as running statistics differ between ranks, each of which has seen other samples.
        trained = [value for name, value in digests.items() if name.startswith("weights/")]
        return {
            "digests": digests,
            "sketches": {name: sketch_of(arrays).tolist() for name, arrays in state_parts.items()},
            "ranks_agree": len(set(map(tuple, self._collective.all_gather(trained)))) == 1,
        }

    def after_update(self) -> dict[str, Any]:
        """Return ``look()`` and ``samples``, a digest of the micro batches of all ranks in the update just run.

        Where predictions have decided with which objects they are compared, ``decided`` has a digest of that for each sample.
        """
        # Taken from the front: a loader that reads ahead has appended those of later updates.
        order = self._in_turn([self._batch_digests.popleft() for _ in range(self._accumulate)])
        found = {"samples": hashlib.sha256("".join(order).encode()).hexdigest()[:DIGITS], **self.look()}
        if self._decided:
            micro_batches = [ops.to_numpy(x) for x in self._decided]
            self._decided.clear()
            digests = [[hashlib.sha256(row.tobytes()).hexdigest()[:8] for row in rows] for rows in micro_batches]
            found["decided"] = [digest for rows in self._in_turn(digests) for digest in rows]
        return found

    def _in_turn(self, mine: list[Any]) -> list[Any]:
        """Return what all ranks have of each micro batch, given this rank's, in the order of the update's samples."""
        everyone = self._collective.all_gather(mine)
        of_ranks = everyone if self._readers is None else [everyone[rank] for rank in self._readers]
        return [of_ranks[rank][turn] for turn in range(self._accumulate) for rank in range(len(of_ranks))]


class _WatchedLoader:
    """A loader that appends the digest of each of its micro batches to a queue, also of prefetched ones."""

    def __init__(self, inside: Loader, batch_digests: deque[str]) -> None:
        self._inside = inside
        self._batch_digests = batch_digests
        self.updates_per_epoch = inside.updates_per_epoch

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        self._batch_digests.clear()
        for batch in self._inside.micro_batches(epoch, start):
            self._batch_digests.append(digest(batch))
            yield batch

    def close(self) -> None:
        self._inside.close()


class Shares:
    """Collects, for one rank, the share of each update's time in which the rank waited for other ranks."""

    def __init__(self) -> None:
        self._former_total: float | None = None
        self._shares = compact.array("d")
        self._seen, self._stride = 0, 1
        """Updates so far, and of how many one is kept: a run may make millions."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Add the record of an update. It has ``communication_s``, a running total, if the backend measures it.

        The first record yields no share, because its total includes the time before the first update.
        """
        total = record.get("communication_s")
        if total is not None and self._former_total is not None:
            if self._seen % self._stride == 0:
                self._shares.append(min(1.0, (total - self._former_total) / record["update_seconds"]))
            self._seen += 1
            if len(self._shares) > MOST_SHARES:
                # Every other one is dropped, and as many are taken from now on, so that memory stays bounded.
                self._shares, self._stride = self._shares[::2], self._stride * 2
        self._former_total = total

    def summary(self) -> dict[str, float]:
        """Return ``communication_share``, the median over updates; nothing if the backend does not measure it."""
        return {"communication_share": float(np.median(self._shares))} if self._shares else {}


def traffic() -> dict[str, int]:
    """Return ``sent_bytes`` of this process so far; nothing if the kernel does not count them."""
    sent = sent_bytes()
    return {} if sent is None else {"sent_bytes": sent}
