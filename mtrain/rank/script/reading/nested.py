"""A loop over epochs around the loop over batches, with the script's own code at the end of each epoch."""

from collections.abc import Iterator
from typing import Any

from mtrain.errors import ScriptError
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.reading.reading import Reading

LEFT = (
    "session.epochs: the loop over session.batches was left in the middle of an epoch, and another epoch was begun; leave both loops, "
    "on all ranks after the same update, or use every batch of an epoch"
)


class Nested:
    """The epochs of a job. An epoch's last update is counted and saved when the next epoch is asked for."""

    def __init__(self, count: int | None) -> None:
        """``count``: number of epochs; None: as the spec says."""
        self.count = count
        self._dataset: Any = None
        self._reading: Reading | None = None
        self._loop: ScriptLoop | None = None
        self._ahead: list[Any] = []
        """The first batch of an epoch, which was read when the epoch was asked for."""
        self._is_open = False
        """Whether the script has asked for the batches of the epoch in hands."""

    @property
    def has_ended(self) -> bool:
        """Tell whether the last update was made."""
        return self._loop is not None and self._loop.has_ended

    def start(self, loop: ScriptLoop, reading: Reading, dataset: Any) -> Iterator[Any]:
        """Return the batches of the first epoch; ``dataset`` as the script gives it."""
        self._loop, self._reading, self._dataset = loop, reading, dataset
        return self._batches()

    def again(self, dataset: Any) -> Iterator[Any]:
        """Return the batches of a further epoch.

        Raises:
            ScriptError: the data set is another one, or the batches of this epoch were asked for before.
        """
        if not _same(dataset, self._dataset):
            raise ScriptError(
                "session.batches: another data set given than in the epoch before; make the data set and its DataLoader once, before the "
                "loop over session.epochs"
            )
        if self._is_open:
            raise ScriptError(
                "session.batches: called twice in one epoch of session.epochs; read several data sets side by side: "
                "session.batches((loader, other))"
            )
        return self._batches()

    def epochs(self, first: int) -> Iterator[int]:
        """Yield the numbers of the epochs from ``first`` on."""
        if self.count is not None and first >= self.count:
            return
        yield first
        while True:
            loop = self._loop
            if loop is None:
                raise ScriptError("session.epochs: an epoch without a loop over session.batches")
            if loop.has_ended:
                return
            if not self._at_end(loop):
                raise ScriptError(LEFT)
            # Asking for the next batch finishes the last update of the epoch. It is done here and not in `_batches`, so that what
            # the script does at the end of an epoch, such as stepping a scheduler, is in the checkpoint of that update, and is
            # not repeated by a job that resumes it.
            if (batch := next(loop, None)) is None:
                return
            self._ahead, self._is_open = [batch], False
            yield loop.progress.epoch

    def _batches(self) -> Iterator[Any]:
        loop = self._loop
        assert loop is not None
        self._is_open = True
        while self._ahead:
            yield self._ahead.pop()
        while not self._at_end(loop):
            if (batch := next(loop, None)) is None:
                return
            yield batch
        loop.check_used()

    def _at_end(self, loop: ScriptLoop) -> bool:
        """Tell whether the micro batch in hands is the last one of its epoch."""
        micro, progress = loop.loop.micro, loop.progress
        assert self._reading is not None
        return micro is not None and micro.last and self._reading.ends_after(progress)


def _same(one: Any, other: Any) -> bool:
    """Return whether a script has given the same data set twice; a tuple or dict of them may be made anew."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_same(one[key], other[key]) for key in one)
    return one is other
