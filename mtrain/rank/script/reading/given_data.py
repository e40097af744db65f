"""The data of a training loop as a script gives it: a data set, a stream, a DataLoader, or several of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.samples.sampler import Shares
from mtrain.data.objects import Seed
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.epochs import BatchOf, Cutting, batch_at
from mtrain.rank.script.reading.loaders import ReadLoader, read_loader
from mtrain.rank.script.reading.order import Order
from mtrain.rank.script.reading.stream import Shard, is_stream
from mtrain.rank.script.reading.together import Several, first_batch, several
from mtrain.rank.script.reading.training_data import Request, Source, open_source, opened_together
from mtrain.rank.script.settings import loop_changes
from mtrain.spec.model import Spec


@dataclass(kw_only=True)
class GivenData:
    """What a script gives for its loop, see ``Session.batches``, and what follows from it.

    Raises:
        ScriptError: values are given that do not go together.
    """

    dataset: Any
    global_batch: int | BatchOf | Mapping[str, int] | tuple[int, ...] | None
    order: Order | None
    drop_last: bool | None
    shard: Shard | None
    collate: Callable[[Sequence[Any]], Any] | None
    nondeterministic: str
    workers: int | None
    _parts: Several | None = field(init=False)
    """Several data sets, which are read side by side."""
    _read: ReadLoader = field(init=False)
    """The data set, or the first one of several."""
    _batch: Any = field(init=False)
    """Samples of an update, or a function from the epoch to them; None: not given here."""

    def __post_init__(self) -> None:
        """Look into the data set."""
        parts = self._parts = several(self.dataset)
        if parts is not None and (self.order or self.shard or self.collate):
            raise ScriptError(
                "session.batches: order, shard or collate given with several data sets; give each as a DataLoader with its own sampler and "
                "collate_fn"
            )
        first = self.dataset if parts is None else next(iter(parts.values() if isinstance(parts, Mapping) else parts))
        self._read = read_loader(first, call="session.batches")
        self._batch = self.global_batch if parts is None else first_batch(self.global_batch)
        self._own_batches = self._read.batches if self._batch is None and self.order is None else None

    @property
    def divides(self) -> bool:
        """Whether every update has the same number of samples, which must then divide among the shards."""
        return self._own_batches is None and not callable(self._batch)

    def changes(self, *, epochs: int | None, updates: int | None, outside_paths: frozenset[str]) -> dict[str, Any]:
        """Return the values of the spec, by dotted path, that the data and the length of the loop set.

        ``outside_paths``: what the user of ``mtrain run`` has set.

        Raises:
            ScriptError: two lengths are given, or nobody has given a batch, or one of a stream that changes.
        """
        if self._batch is None and "train.batch_size" not in outside_paths:
            self._batch = self._read.batch_size
        if callable(self._batch) and self._is_stream:
            raise ScriptError(
                "session.batches: global_batch is a function, but a stream's epochs have no known length; give a number"
            )
        first = batch_at(self._batch, 0, len(self._read.dataset)) if callable(self._batch) else self._batch
        return loop_changes(global_batch=first, epochs=epochs, updates=updates, outside_paths=outside_paths)

    def opened(self, spec: Spec, shares: Shares, seed_framework: Seed) -> Source:
        """Return where the micro batches come from; ``spec`` has the values of ``changes``.

        Raises:
            ScriptError: the data set cannot be used, or cannot be read in this way.
        """
        read = self._read
        request = Request(
            cutting=Cutting(
                batch=self._batch if callable(self._batch) else spec.train.batch_size,
                order=self.order or read.order,
                batches=self._own_batches,
                drops_last=read.drops_last if self.drop_last is None else self.drop_last,
            ),
            shard=self.shard,
            collate=self.collate or read.collate,
            nondeterministic=self.nondeterministic,
            workers=self._workers,
        )
        if self._parts is None:
            return open_source(read.dataset, request, spec, shares, seed_framework)
        return opened_together(self._parts, self.global_batch, request, spec, shares, seed_framework)

    @property
    def _is_stream(self) -> bool:
        return is_stream(self._read.dataset, self.shard)

    @property
    def _workers(self) -> int | None:
        if self.workers is not None or self._parts is not None:
            return self.workers
        # Streams are read in this process, whatever the loader would have done.
        return 0 if self._is_stream else self._read.workers
