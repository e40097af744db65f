"""What every way to read a script's data answers the training loop: the next batch, and where epochs end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.core.interfaces import HostBatch, Progress, RankSession
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.errors import CheckpointError, ScriptError
from mtrain.spec.model import Spec


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How the batches of a reading get to the device of this rank."""

    rank: RankSession
    shares: Shares
    fills_shards: bool
    """Whether no shard of an update may be empty."""
    floats: Any
    """Dtype of floating-point arrays in batches; None: as the data set has them."""
    saw: Callable[[HostBatch], None]
    """Takes note of the arrays of the next micro batch."""


class Reading(ABC):
    """The micro batches of a script. ``Samples`` are read by number, a ``Stream`` to its end; ``MadeBatches`` the script makes.

    It is the ``Feed`` of the training loop, which sets ``delivery`` before it asks for a batch. An update is named by its epoch and
    its position in it. The defaults are those of batches of one length, in epochs of one length or in a single epoch without an end.
    """

    delivery: Delivery
    """Set by ``Training``, once the models say what they need of a batch."""
    length: int | None = None
    """Number of samples; None: it is not known, or there is none."""
    global_batch: int = 0
    """Samples of an update over all ranks, where all have as many."""
    draws_alike: bool = False
    """See ``Job.draws_alike``."""
    spans_epochs: bool = True
    """See ``Feed.spans_epochs``."""
    no_epochs: str = ""
    """What is said where the length of a job is given in epochs, whose length is not known."""
    differs: str = (
        "session.batches: the ranks read their samples in different orders; give every rank the whole data set, and an "
        "`order` that depends on the epoch alone. mtrain divides the samples among the ranks"
    )
    """What is said where the ranks have trained on different samples."""

    @property
    @abstractmethod
    def updates_per_epoch(self) -> int | None:
        """Number of updates of each epoch; None: epochs differ, or their length shows at their end."""
        ...

    @abstractmethod
    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Iterator[Any]:
        """Yield the micro batches of this rank from update ``start`` to the end of the epoch."""
        ...

    def updates_of(self, epochs: int) -> int:
        """Return the number of updates of the first ``epochs`` epochs.

        Raises:
            ScriptError: it is not known before they have ended.
        """
        if self.updates_per_epoch is None:
            raise ScriptError(self.no_epochs)
        return epochs * self.updates_per_epoch

    def place(self, update: int) -> tuple[int, int]:
        """Return (epoch, position) of an update of the job."""
        return (0, update) if self.updates_per_epoch is None else divmod(update, self.updates_per_epoch)

    def size(self, epoch: int, position: int) -> int:
        """Return the number of samples of an update over all ranks."""
        return self.global_batch

    def samples(self, progress: Progress) -> int:
        """See ``Feed.samples``."""
        return self.size(progress.epoch, progress.position)

    def fill(self, progress: Progress, number: int) -> float:
        """See ``Feed.fill``.

        Raises:
            ScriptError: a shard has no sample, and BatchNorm layers take statistics over all shards.
        """
        shares = self.delivery.shares
        samples, shards = self.samples(progress), shares.shards * shares.rounds
        if self.delivery.fills_shards and samples < shards:
            raise ScriptError(
                f"session.batches: update {progress.update} has {samples} of the {shards} samples that one in each micro batch of each "
                "rank would need, because sync_batchnorm is on; leave such batches out (drop_last=True), or train without it"
            )
        return shares.fill(number, samples)

    def open(self, progress: Progress) -> Iterator[Any]:
        """See ``Feed.open``."""
        # A backend moves flat mappings, some of them ahead of their use, so their nestings wait in a queue beside them.
        structures: list[Any] = []
        for tensors in self.delivery.rank.batches(self._flatten(progress.epoch, progress.position, structures)):
            yield trees.rebuilt(structures.pop(0), tensors)

    def _flatten(self, epoch: int, position: int, structures: list[Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the arrays of the batches from an update on, and add their nestings to ``structures``."""
        while True:
            for batch in self.micro_batches(epoch, position, shares=self.delivery.shares):
                arrays, structure = trees.flatten(batch, floats=self.delivery.floats)
                if not arrays:
                    raise ScriptError(
                        f"session.batches: a batch of type {type(batch).__name__} holds no array and no tensor; return arrays, "
                        "tensors or numbers from the data set, or give a `collate`"
                    )
                structures.append(structure)
                self.delivery.saw(arrays)
                yield arrays
            epoch, position = epoch + 1, 0

    def ends_after(self, progress: Progress) -> bool:
        """Return whether this rank has no further update in its epoch."""
        return progress.position + 1 == self.updates_per_epoch

    def order(self, epoch: int) -> int:
        """Return a checksum of what is read in ``epoch``, by which ranks see that they read the same; 0: they need not."""
        return 0

    def state_before(self, epoch: int, position: int) -> Any:
        """Return what a checkpoint needs beside (epoch, position) to go on before an update; None: nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Go on from what ``state_before`` has returned."""
        return

    def close(self) -> None:
        """End the processes that read samples."""
        return

    def check_continues(self, progress: Progress) -> None:
        """Refuse to resume if the order of samples would differ from that of the updates made before.

        Raises:
            CheckpointError: the global batch or the length of the data set has changed.
        """
        epoch, position = self.place(progress.update)
        each = self.updates_per_epoch
        if each is None:
            seen = progress.samples  # they are those of epochs that would all have to be asked for again
        else:
            whole = sum(self.size(0, number) for number in range(each))
            seen = epoch * whole + sum(self.size(0, number) for number in range(position))
        if (progress.epoch, progress.position, progress.samples) != (epoch, position, seen):
            raise CheckpointError(
                f"--resume: the checkpoint after update {progress.update} is at epoch {progress.epoch}, position {progress.position}, "
                f"{progress.samples} samples; with the data and batches of now it would be at epoch {epoch}, position {position}, {seen} "
                "samples. Use the batches and data it was trained with, or start a new job"
            )


def number_of_updates(spec: Spec, reading: Reading) -> int:
    """Return the length of the loop.

    Raises:
        ScriptError: it is given in epochs, whose length is unknown.
    """
    if spec.train.updates is not None:
        return spec.train.updates
    assert spec.train.epochs is not None, "`check_loop` refuses a loop without a length"
    return reading.updates_of(spec.train.epochs)


def check_schedule(spec: Spec, reason: str) -> None:
    """Refuse a schedule that counts epochs where their length is not known before.

    Raises:
        ScriptError: the schedule counts epochs; the message names ``reason``.
    """
    schedule = spec.schedule
    if schedule.name == "step" or schedule.per == "epoch" or getattr(schedule.warmup, "epochs", None):
        raise ScriptError(
            f"session.batches: the schedule {schedule.name!r} counts epochs, but {reason}; use one per update, such as mtrain.Cosine(), or "
            "a function from the update to the learning rate"
        )
