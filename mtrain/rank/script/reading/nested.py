"""Loops of a script around that over batches or updates: epochs with code at their ends, bodies that a job makes whole."""

from collections.abc import Callable, Iterator
from typing import Any

from mtrain.core.interfaces import Progress
from mtrain.errors import ScriptError
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.reading.reading import Reading

LEFT = (
    "session.epochs: the loop over session.batches was left in the middle of an epoch, and another epoch was begun; leave both loops, "
    "on all ranks after the same update, or use every batch of an epoch"
)


class Bodies:
    """The bodies of the loop over ``session.range``. A job is saved at the end of a body, and goes on at the begin of the next one."""

    def __init__(self, count: int, seed: Callable[[str], None], *, is_trial: bool) -> None:
        """``seed`` seeds the generators alike on all ranks, at a ``begin`` or ``within`` a body. A trial may end before the last one."""
        self._count, self._seed, self._is_trial = count, seed, is_trial
        self._next = 0
        """The body that follows the last one that was made."""
        self.loop: ScriptLoop | None = None
        self.lengths: tuple[int | None, int | None] = (None, None)
        """The global batch and the number of updates with which the loop was started."""

    def state_dict(self) -> dict[str, int]:
        """Return the place, for checkpoints."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a place."""
        self._next = state["next"]

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the bodies that are left."""
        for number in range(self._next, self._count):
            self._seed("begin")
            try:
                yield number
            finally:  # also where the script leaves the loop
                self._next = number + 1
            if self.loop is None:
                raise ScriptError("session.range: a body without a loop over session.updates")
            self.loop.settle()
            if self.loop.has_ended and self._next < self._count:
                self._check_trial(self.loop)
                return

    def updates(self, count: int) -> Iterator[int]:
        """Yield 0 to ``count`` - 1, and make an update for each."""
        loop = self.loop
        assert loop is not None
        try:
            for number in range(count):
                if next(loop, self) is self:
                    self._check_trial(loop)
                    return
                yield number
        finally:
            # Of the last micro batch are those of this rank alone; what the script draws now must be equal on all.
            self._seed("within")

    def _check_trial(self, loop: ScriptLoop) -> None:
        """Refuse an end before the last body, unless a comparison cuts the job short."""
        if not self._is_trial:
            raise ScriptError(
                f"session.updates: total={loop.loop.job.total_updates} updates were made, and the script goes on; give as many as all "
                "loops together make"
            )


class Nested:
    """The epochs of a job. An epoch's last update is counted and saved when the next epoch is asked for."""

    def __init__(self, count: int | None, seed: Callable[[str], None] | None = None) -> None:
        """``count``: number of epochs; None: as the spec says. ``seed``: of epochs that are made whole, see ``Bodies``."""
        self.count, self._seed = count, seed
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
        loop.loop.holds = self._seed is not None
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

    def epochs(self, progress: Progress) -> Iterator[int]:
        """Yield the numbers of the epochs from where the job stands."""
        if self.count is not None and progress.epoch >= self.count:
            return
        if self._seed is not None:
            self._seed("begin")
        yield progress.epoch
        while True:
            loop = self._loop
            if loop is None:
                raise ScriptError("session.epochs: an epoch without a loop over session.batches")
            if self.has_ended:
                return
            if not self._at_end(loop):
                raise ScriptError(LEFT)
            # Asking for the next batch finishes the last update of the epoch. It is done here and not in `_batches`, so that what
            # the script does at the end of an epoch, such as stepping a scheduler, is in the checkpoint of that update, and is
            # not repeated by a job that resumes it.
            if self._seed is not None:
                loop.settle()
                self._seed("begin")
            else:
                self._ahead = [batch for batch in (next(loop, None),) if batch is not None]
            if loop.has_ended:
                return
            self._is_open = False
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
