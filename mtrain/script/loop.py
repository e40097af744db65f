"""The training loop of a script: ``session.batches`` yields micro batches, ``optimizer.update`` uses each of them."""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain.core.cadence import Cadence, advanced
from mtrain.core.interfaces import Collective, HostBatch, Optimizer, Progress, RankSession, Rates, Why
from mtrain.core.update_record import FinishedUpdate, check_finite
from mtrain.data import trees
from mtrain.errors import Interrupted, ScriptError
from mtrain.script.samples import Samples
from mtrain.script.stream import Stream

DUE, REQUESTED = 1.0, 2.0
"""How a rank asks for a checkpoint: the script or the spec wants one, or somebody has sent SIGUSR1. The largest value of
all ranks counts."""


@dataclass(kw_only=True)
class Hooks:
    """The parts of a session that the loop uses."""

    rank: RankSession
    """The backend's session of this rank."""
    samples: Samples | Stream
    schedule: Callable[[int], Rates]
    total_updates: int
    accumulate: int
    saves: Cadence
    max_nonfinite: int
    report_every: int
    floats: Any
    """Dtype of floating-point arrays in batches; None: as the data set has them."""
    stop: Callable[[], bool]
    save_requested: Callable[[], bool]
    """Returns whether this rank was asked to save and to go on."""
    save: Callable[[Progress, float | None, Why], None]
    record: Callable[[Mapping[str, Any]], None]
    saw: Callable[[HostBatch], None]
    """Takes note of the arrays of the next micro batch."""


@dataclass
class _Micro:
    """The micro batch that the script has in hands."""

    number: int
    """Its place within the update."""
    last: bool
    context: ExitStack
    updated: bool = False


@dataclass
class _Losses:
    """Values to report for one update: those of each micro batch by name."""

    values: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Add a number or a tensor, without waiting for the device."""
        self.values.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)

    def means(self) -> dict[str, float]:
        """Return the mean of each value; waits for the device.

        It is computed in float64, so that one rank with two micro batches reports what two ranks report.
        """
        return {name: sum(map(float, values)) / len(values) for name, values in sorted(self.values.items())}


class Updater:
    """The optimizer of a script: one call of ``update`` for each micro batch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.native = optimizer
        """The backend's own optimizer object."""
        self.loop: Loop | None = None
        self.norm = math.nan
        """Norm of the last update's gradient, before clipping."""
        self.rates: Rates | None = None
        """Rates of the last update."""

    def update(self, loss: Any) -> None:
        """Use the loss of the current micro batch; the last one of an update changes the weights.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.

        Raises:
            ScriptError: there is no batch in hands, it was used already, or the loss is not a number with a gradient.
        """
        if self.loop is None:
            raise ScriptError("optimizer.update: called outside of `for batch in session.batches(...)`")
        self.loop.use(loss)


class Loop(Iterator[Any]):
    """The micro batches of this rank, from the progress of the job to its end."""

    def __init__(self, hooks: Hooks, updater: Updater, progress: Progress) -> None:
        self._hooks = hooks
        self._updater = updater
        self.progress = progress
        self._batches: Iterator[Any] | None = None
        self._structures: list[Any] = []
        self._micro: _Micro | None = None
        self._losses = _Losses()
        self._started = self._saved_at = time.perf_counter()
        self._waited = 0.0
        self.saved_update = progress.update or -1
        self.save_now = False
        self.score: float | None = None
        """Score of the current weights, if it is the best so far."""
        self.ended = False
        updater.loop = self

    @property
    def has_updated(self) -> bool:
        """Tell whether an update has changed the weights that ``progress`` does not count yet."""
        return self._micro is not None and self._micro.updated and self._micro.last

    # ------------------------------------------------------------------------------------------------- iteration
    def __next__(self) -> Any:
        """Finish the micro batch before, and return the next one.

        Raises:
            StopIteration: the last update of the job was made.
            ScriptError: the micro batch before was not used.
            Interrupted: some rank was asked to end; the state is saved.
        """
        if self.ended:
            raise StopIteration
        self.finish_micro_batch()
        if self.progress.update >= self._hooks.total_updates:
            self._end()
            raise StopIteration
        number = 0 if self._micro is None else self._micro.number + 1
        batch = self._next_batch()
        self._begin(number)
        return batch

    def close(self) -> None:
        """End the loop before its last update, after ``break``; every rank must call, after the same update.

        Raises:
            ScriptError: the loop was left in the middle of an update, or other ranks go on.
        """
        if self.ended:
            return
        micro, place = self._micro, self._place
        if micro is not None and self.has_updated:
            self._micro = None
            self._finish_update(leaves=self.progress.update + 1 < self._hooks.total_updates)
        self._end()
        if micro is not None and not (micro.updated and micro.last):
            micro.context.close()
            raise ScriptError(
                f"session.batches: the loop was left in the middle of {place}; leave it after the optimizer.update(loss) that "
                "completes an update, on all ranks at the same one"
            )

    def _end(self) -> None:
        if self._micro is not None:
            self._micro.context.close()
        self._micro = None
        self.ended = True
        self._updater.loop = None
        self._batches = None
        self._hooks.samples.close()

    def _next_batch(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._hooks.rank.batches(self._host_batches()))
        began = time.perf_counter()
        tensors = next(self._batches)
        self._waited += time.perf_counter() - began
        return trees.rebuilt(self._structures.pop(0), tensors)

    def _host_batches(self) -> Iterator[Mapping[str, Any]]:
        """Yield the arrays of the batches, and remember their structure until the device has them."""
        hooks, collective = self._hooks, self._hooks.rank.collective
        epoch, position = self.progress.epoch, self.progress.position
        while True:
            batches = hooks.samples.micro_batches(epoch, position, collective=collective, accumulate=hooks.accumulate)
            for batch in batches:
                arrays, structure = trees.flattened(batch, floats=hooks.floats)
                if not arrays:
                    raise ScriptError(
                        f"session.batches: a batch of type {type(batch).__name__} holds no array and no tensor; return arrays, "
                        "tensors or numbers from the data set, or give a `collate`"
                    )
                self._structures.append(structure)
                hooks.saw(arrays)
                yield arrays
            epoch, position = epoch + 1, 0

    def _begin(self, number: int) -> None:
        hooks, last = self._hooks, number == self._hooks.accumulate - 1
        optimizer = self._updater.native
        shard = number * hooks.rank.collective.size + hooks.rank.collective.rank
        optimizer.seed_shard(shard)
        context = ExitStack()
        context.enter_context(optimizer.micro_batch(last=last))
        self._micro = _Micro(number, last, context)

    # ------------------------------------------------------------------------------------------------- one update
    @property
    def _place(self) -> str:
        number = 0 if self._micro is None else self._micro.number
        return f"update {self.progress.update}, micro batch {number} of {self._hooks.accumulate}"

    def use(self, loss: Any) -> None:
        """Use the loss of the micro batch in hands, see ``Updater.update``."""
        if self._micro is None:
            raise ScriptError("optimizer.update: called before the first batch of the loop")
        if self._micro.updated:
            raise ScriptError(f"optimizer.update: called twice for one batch ({self._place}); call it once")
        check_loss(loss, self._place)
        optimizer, micro = self._updater.native, self._micro
        optimizer.backward(loss)
        micro.updated = True
        micro.context.close()
        self._losses.add("loss", loss)
        if micro.last:
            self._updater.rates = self._hooks.schedule(self.progress.update)
            self._updater.norm = optimizer.step(self._updater.rates)

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the current update."""
        if self._micro is None:
            raise ScriptError("session.log: called before the first batch of the loop")
        for name, value in values.items():
            if name == "loss" and self._micro.updated:
                continue  # ``update`` has reported it already
            self._losses.add(name, value)

    def finish_micro_batch(self) -> None:
        """Check that the micro batch in hands was used; after the last one of an update, agree, report and save."""
        micro = self._micro
        if micro is None:
            return
        if not micro.updated:
            micro.context.close()
            raise ScriptError(
                f"session.batches: optimizer.update(loss) was not called for the batch of {self._place}; call it once for every "
                "batch"
            )
        if micro.last:
            self._micro = None
            self._finish_update()

    def _finish_update(self, *, leaves: bool = False) -> None:
        hooks, before, norm = self._hooks, self.progress, self._updater.norm
        agreed = self._agree(before, norm, leaves=leaves)
        self.progress = advanced(
            before,
            updates_per_epoch=hooks.samples.updates_per_epoch,
            samples=hooks.samples.global_batch,
            finite=math.isfinite(norm),
            ended=agreed.epoch_ends,
        )
        if agreed.epoch_ends and isinstance(hooks.samples, Stream):
            # Ranks whose part of the stream is longer leave the rest of it.
            self._batches, self._structures = None, []
        check_finite(before, self.progress, max_nonfinite=hooks.max_nonfinite)
        if agreed.stop:
            self.save("ending")
        elif agreed.save or hooks.saves.due(self.progress):
            self.save("requested" if agreed.save == REQUESTED else "due")
        elif self.score is not None:
            self.save("best")
        if agreed.stop:
            raise Interrupted(f"ended from outside at update {self.progress.update}, state saved; go on with --resume")

    def interrupt(self) -> None:
        """Save for the end of the job in the body of the loop; every rank must call.

        An update that has changed the weights is finished. One that is incomplete is dropped, and made again on resume.
        """
        if self._micro is not None:
            self._micro.context.close()
        if self.has_updated:
            self._micro = None
            self._finish_update()
        if self.saved_update != self.progress.update:
            self.save("ending")
        self._end()

    def save(self, why: Why = "due") -> None:
        """Write a checkpoint; every rank must call."""
        self._hooks.save(self.progress, self.score, why)
        self.saved_update = self.progress.update
        self._saved_at = time.perf_counter()
        self.save_now, self.score = False, None

    def _agree(self, before: Progress, norm: float, *, leaves: bool) -> "Agreed":
        """Exchange requests and values between ranks, and report."""
        hooks, collective = self._hooks, self._hooks.rank.collective
        reported = before.update % hooks.report_every == 0 or not math.isfinite(norm)
        means = self._losses.means() if reported else {}
        overdue = hooks.saves.overdue(time.perf_counter() - self._saved_at)
        own = Agreed(
            stop=hooks.stop(),
            save=REQUESTED if hooks.save_requested() else DUE * (self.save_now or (overdue and collective.rank == 0)),
            epoch_ends=hooks.samples.ends_after(before.epoch, before.position),
        )
        agreed = agree(collective, own, names=tuple(means), update=before.update + 1, leaves=leaves)
        if reported:
            values = collective.all_reduce(np.array([*means.values(), self._waited]), "mean")
            *losses, waited = (float(value) for value in values)
            assert self._updater.rates is not None
            update = FinishedUpdate(
                before=before,
                updates_per_epoch=hooks.samples.updates_per_epoch,
                total_updates=hooks.total_updates,
                global_batch=hooks.samples.global_batch,
                losses=dict(zip(means, losses, strict=True)),
                rates=self._updater.rates,
                norm=norm,
                seconds=time.perf_counter() - self._started,
                waited_s=waited,
            )
            hooks.record({**update.record(hooks.rank), "unit": "samples"})
        self._losses, self._waited, self._started = _Losses(), 0.0, time.perf_counter()
        return agreed


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What a rank asks for after an update, or what all ranks have agreed on because one of them asks for it."""

    stop: bool
    """End the job now."""
    save: float
    """Write a checkpoint now: ``DUE`` or ``REQUESTED``; 0: not now."""
    epoch_ends: bool
    """It was the last update of its epoch."""


def agree(collective: Collective, own: Agreed, *, names: tuple[str, ...], update: int, leaves: bool) -> Agreed:
    """Agree after an update, and check that all ranks are at the same place. Every rank must call, after every update.

    ``leaves``: this rank leaves the loop after this update.

    Raises:
        ScriptError: some ranks have left the loop and others have not, or they report different values. It is raised on
            every rank.
    """
    mark = zlib.crc32("\n".join(names).encode())
    place = [mark, update, int(leaves)]
    signed = [float(value) for number in place for value in (number, -number)]
    requests = [float(own.stop), own.save, float(own.epoch_ends)]
    agreed = collective.all_reduce(np.array([*requests, *signed]), "max")
    same = [agreed[3 + 2 * i] == -agreed[4 + 2 * i] for i in range(len(place))]
    if not same[2] or not same[1]:
        raise ScriptError(
            f"session.batches: some ranks leave the loop after update {update - 1}, and others go on; leave it on all ranks at "
            "the same update, by a decision on values that are equal on all ranks, such as those of session.evaluate"
        )
    if not same[0]:
        raise ScriptError(
            f"session.log: the ranks report different names in update {update - 1} (this rank: {', '.join(names) or 'none'}); "
            "log the same names on every rank"
        )
    return Agreed(stop=bool(agreed[0] > 0), save=float(agreed[1]), epoch_ends=bool(agreed[2] > 0))


def check_loss(loss: Any, place: str) -> None:
    """Refuse a loss without a gradient, or with several numbers.

    Raises:
        ScriptError: the loss cannot be used; the message says what to do.
    """
    call = f"optimizer.update ({place})"
    if isinstance(loss, Mapping):
        raise ScriptError(f"{call}: the loss is a dict with {', '.join(map(str, loss))}; give one of its values")
    if not hasattr(loss, "backward"):
        raise ScriptError(f"{call}: the loss is a {type(loss).__name__}; expected a tensor that the model computed")
    if math.prod(loss.shape) != 1:
        raise ScriptError(
            f"{call}: the loss has the shape {tuple(loss.shape)}; expected a single number: the mean over the micro batch, "
            "loss.mean()"
        )
    if getattr(loss, "stop_gradient", False) or getattr(loss, "requires_grad", True) is False:
        raise ScriptError(
            f"{call}: the loss carries no gradient; compute it from the output of the model that session.prepare returned, "
            "outside of no_grad and without detach()"
        )
