"""Read a stream: a data set that can only be iterated over, from its beginning to its end."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from mtrain.core.interfaces import Progress
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.data.objects import Seed, seed_everything
from mtrain.errors import CheckpointError, DataError, ScriptError
from mtrain.rank.script.reading.loaders import Shard
from mtrain.rank.script.reading.reading import Reading


class Stream(Reading):
    """The samples of a stream. Each rank reads all of it and keeps its share, or reads a part of its own.

    One pass is an epoch. A pass ends when a rank cannot fill another update; what is left of it is dropped, and the next
    pass begins.
    """

    # Ranks whose part of a stream is longer leave the rest of it at the end of an epoch.
    spans_epochs = False
    no_epochs = (
        "session.batches: epochs= given with a stream that has no length, so that schedules and the end of the job are unknown; give "
        "updates="
    )

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int,
        shard: Shard | None,
        collate: Callable[[Sequence[Any]], Any] | None,
        seed_framework: Seed,
    ) -> None:
        """Check that the stream can be iterated over more than once.

        Raises:
            ScriptError: it is an iterator.
        """
        self.dataset = dataset
        self.length = len(dataset) if hasattr(dataset, "__len__") else None
        self.global_batch = global_batch
        self._seed = seed
        self._shard = shard
        self._collate = collate or trees.collate
        self._seed_framework = seed_framework
        self._last: tuple[int, int] | None = None
        """(epoch, update) of the last update that this rank's stream fills; None: it has not ended yet."""
        self._states: dict[tuple[int, int], Any] = {}
        """State of the stream before each update that was read and not yet used, by (epoch, update)."""
        self._restored: Any = None
        if hasattr(dataset, "__next__"):
            raise ScriptError(
                f"session.batches: the data set is an iterator, a {type(dataset).__name__}, which can be read once; give an "
                "object whose __iter__ begins anew for each epoch and after a resume"
            )
        if shard is None and not hasattr(dataset, "__iter__"):
            raise ScriptError(
                f"session.batches: the data set, a {type(dataset).__name__}, has neither __getitem__ nor __iter__; expected "
                "items by number and a length, or a stream"
            )

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of complete global batches in one pass; None: that shows at its end."""
        return None if self.length is None else self.length // self.global_batch

    def ends_after(self, progress: Progress) -> bool:
        """Return whether this rank cannot fill another update of the pass.

        Raises:
            ScriptError: the stream has a length, and ended before it.
        """
        epoch, position = progress.epoch, progress.position
        ends = self._last == (epoch, position)
        if ends and self.updates_per_epoch is not None and position + 1 < self.updates_per_epoch:
            raise ScriptError(
                f"session.batches: the stream has a length of {self.length} samples, but it ended in epoch {epoch} after update "
                f"{position} of {self.updates_per_epoch}; correct its __len__, or leave it out and give updates="
            )
        return ends or super().ends_after(progress)

    def check_continues(self, progress: Progress) -> None:
        """See ``Reading.check_continues``; where a pass ends is not known, so the number of samples must suffice."""
        if self.updates_per_epoch is not None:
            super().check_continues(progress)
        elif progress.samples != progress.update * self.global_batch:
            raise CheckpointError(
                f"--resume: the checkpoint was written after {progress.update} updates and {progress.samples} samples, which "
                f"does not fit global_batch={self.global_batch}; go on with the batch of before"
            )

    def state_before(self, epoch: int, position: int) -> Any:
        """Return the stream's ``state_dict()`` from before update ``position`` of the pass; None: it has none."""
        self._states = {key: state for key, state in self._states.items() if key >= (epoch, position)}
        return self._states.get((epoch, position))

    def restore(self, state: Any) -> None:
        """Continue from ``state`` in place of reading the samples of former updates once more."""
        self._restored = state

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Iterator[Any]:
        """Yield the micro batches of this rank from update ``start`` to the end of the pass.

        Raises:
            ScriptError: the stream cannot fill a single update or is longer than it says, or a sample cannot be used.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        count = self.global_batch if self._shard is None else self.global_batch // shares.size
        samples, numbers = self._open(epoch, start, shares, count)
        current = self._read(samples, numbers, epoch, start, count)
        if current is None:
            raise ScriptError(
                f"session.batches: the stream ended before {count} samples in epoch {epoch}, too early for update {start}; use "
                "a smaller global_batch, or check the stream"
            )
        update = start
        while current is not None and update != self.updates_per_epoch:
            # Read one update ahead, so that the ranks know after each update whether the pass goes on: they leave it together.
            following = self._read(samples, numbers, epoch, update + 1, count)
            if following is None:
                self._last = (epoch, update)
            elif update + 1 == self.updates_per_epoch and self._shard is None:
                raise ScriptError(
                    f"session.batches: the stream has a length of {self.length} samples, but it goes on after them in epoch "
                    f"{epoch}; correct its __len__, which counts samples and not batches, or leave it out and give updates="
                )
            for share in self._divide(current, shares):
                yield self._batch(share)
            current, update = following, update + 1

    def _open(self, epoch: int, start: int, shares: Shares, count: int) -> tuple[Iterator[Any], Iterator[int]]:
        """Return the stream at the beginning of update ``start``, and the numbers of its samples."""
        self._last = None
        restored, self._restored = self._restored, None
        if restored is not None:
            self.dataset.load_state_dict(restored)
        # Before the stream is opened, which may draw, too: the order of its files, for example.
        self._seed_for(epoch, 0)
        source = self.dataset if self._shard is None else self._shard(shares.rank, shares.size)
        samples = iter(source)
        if restored is None:
            # Without a state to go on from, the samples of former updates are read once more and dropped.
            for number in range(start * count):
                self._seed_for(epoch, number)
                if next(samples, trees) is trees:  # any object that no stream yields
                    break
        return samples, iter(range(start * count, 1 << 62))

    def _read(
        self, samples: Iterator[Any], numbers: Iterator[int], epoch: int, update: int, count: int
    ) -> list[Any] | None:
        """Return the samples of one update; None: the stream has ended."""
        if hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict") and self._shard is None:
            # Copied, because a stream may return an object that it goes on to change.
            self._states[epoch, update] = deepcopy(self.dataset.state_dict())
        read: list[Any] = []
        for number in numbers:
            self._seed_for(epoch, number)
            try:
                read.append(next(samples))
            except StopIteration:
                return None
            if len(read) == count:
                break
        return read

    def _seed_for(self, epoch: int, number: int) -> None:
        seed_everything(self.dataset, (self._seed, epoch, number), self._seed_framework)

    def _divide(self, samples: list[Any], shares: Shares) -> Iterator[list[Any]]:
        """Yield the samples of each micro batch of this rank; its own part of a stream is divided for this rank alone."""
        # Parts of ranks differ, so a rank's shares are those of one rank with as many passes.
        own = shares if self._shard is None else Shares(rank=0, size=1, shards=1, rounds=shares.passes)
        for places in own.divide(np.arange(len(samples))):
            yield [samples[int(place)] for place in places]

    def _batch(self, samples: Sequence[Any]) -> Any:
        try:
            return self._collate(samples)
        except DataError as error:
            raise ScriptError(f"session.batches: {error}") from error
