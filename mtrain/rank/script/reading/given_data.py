"""The data of a training loop as a script gives it: a data set, a stream, a DataLoader, or several of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from mtrain.core.samples.sampler import Shares
from mtrain.data.objects import Seed
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.epochs import batch_at
from mtrain.rank.script.reading.loaders import BatchOf, Order, Selection, Shard, is_loader, is_stream, read_loader
from mtrain.rank.script.reading.reading import Reading, check_schedule
from mtrain.rank.script.reading.samples import Samples
from mtrain.rank.script.reading.stream import Stream
from mtrain.rank.script.settings import loop_changes
from mtrain.spec.model import Spec

Several: TypeAlias = Mapping[str, Any] | tuple[Any, ...]


@dataclass(kw_only=True)
class GivenData:
    """What a script gives for its loop, see ``Session.batches``, and what follows from it.

    Raises:
        ScriptError: values are given that do not go together.
    """

    dataset: Any
    global_batch: int | BatchOf | Mapping[str, int] | tuple[int, ...] | None
    order: Order | None
    shuffle: bool | None
    drop_last: bool | None
    shard: Shard | None
    collate: Callable[[Sequence[Any]], Any] | None
    nondeterministic: str
    workers: int | None
    _parts: Several | None = field(init=False)
    """Several data sets, which are read side by side."""
    _read: Selection = field(init=False)
    """What is read of the data set, or of the first one of several, where this call says nothing else."""
    _batch: Any = field(init=False)
    """Samples of an update, or a function from the epoch to them; None: not given here."""

    def __post_init__(self) -> None:
        """Look into the data set."""
        parts = self._parts = several(self.dataset)
        if parts is not None and (self.order or self.shard or self.collate or self.shuffle is not None):
            raise ScriptError(
                "session.batches: order, shuffle, shard or collate given with several data sets; give each as a DataLoader with its "
                "own sampler and collate_fn"
            )
        self._read = read_loader(
            self.dataset if parts is None else next(iter(values_of(parts))), call="session.batches"
        )
        if self.shuffle is not None:
            if self.order is not None:
                raise ScriptError("session.batches: order= and shuffle= given; leave one of them out")
            self._read = replace(self._read, batches=None, order=None)  # the DataLoader's own
            length = len(self._read.dataset) if hasattr(self._read.dataset, "__len__") else 0
            self.order = None if self.shuffle else lambda _: range(length)
        self._batch = self.global_batch
        if parts is not None:  # the first data set counts; none is given where its DataLoader says it
            self._batch = next(iter(values_of(self.global_batch)), None)
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
        # That of the DataLoader counts last: the user of `mtrain run` may have given another one.
        if self._batch is None and "train.batch_size" not in outside_paths:
            self._batch = self._read.batch
        if callable(self._batch) and is_stream(self._read.dataset, self.shard):
            raise ScriptError(
                "session.batches: global_batch is a function, but a stream's epochs have no known length; give a number"
            )
        first = batch_at(self._batch, 0, len(self._read.dataset)) if callable(self._batch) else self._batch
        return loop_changes(global_batch=first, epochs=epochs, updates=updates, outside_paths=outside_paths)

    def open(self, spec: Spec, shares: Shares, seed_framework: Seed) -> Reading:
        """Return where the micro batches come from; ``spec`` has the values of ``changes``.

        Raises:
            ScriptError: a data set cannot be used, or cannot be read in this way.
        """
        if self.nondeterministic not in ("refuse", "allow"):
            raise ScriptError(
                f"session.batches: nondeterministic={self.nondeterministic!r} given; expected 'refuse' or 'allow'"
            )
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 0):
            raise ScriptError(
                f"session.batches: workers={self.workers!r} given; expected a number of processes, 0 or more"
            )
        if self._parts is not None:
            return self._open_several(self._parts, spec, shares, seed_framework)
        if is_stream(self._read.dataset, self.shard):
            return self._open_stream(spec, shares, seed_framework)
        # What the call says wins over what the DataLoader says.
        selection = replace(
            self._read,
            batch=self._batch if callable(self._batch) else spec.train.batch_size,
            order=self.order or self._read.order,
            batches=self._own_batches,
            collate=self.collate or self._read.collate,
            drops_last=self._read.drops_last if self.drop_last is None else self.drop_last,
        )
        samples = self._open_samples(selection, seed=spec.train.seed, seed_framework=seed_framework)
        if samples.updates_per_epoch is None:
            check_schedule(spec, "epochs differ in their number of updates")
        return samples

    def _open_samples(self, selection: Selection, *, seed: int, seed_framework: Seed) -> Samples:
        """Return the samples of a data set that is read by number."""
        samples = Samples(selection, seed=seed, seed_framework=seed_framework)
        if self.nondeterministic != "allow":
            samples.check_repeatable()
        if workers := selection.workers if self.workers is None else self.workers:
            samples.use_workers(workers)
        return samples

    def _open_several(self, given: Several, spec: Spec, shares: Shares, seed_framework: Seed) -> Samples:
        """Return the samples of several data sets, an update of which takes a batch of each."""
        names: list[Any] = list(given) if isinstance(given, Mapping) else list(range(len(given)))
        divided = shares.shards * shares.rounds
        selections = []
        for name, dataset, batch in zip(names, values_of(given), batches_of(self.global_batch, names), strict=True):
            read = read_loader(dataset, call="session.batches")
            batch = read.batch if batch is None else batch
            if read.batches is not None or is_stream(read.dataset):
                what = "makes batches of its own" if read.batches is not None else "is a stream"
                raise ScriptError(
                    f"session.batches: data set {name!r} of several {what}; read beside others it needs samples by number and one batch "
                    "size"
                )
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 or batch % divided:
                raise ScriptError(
                    f"session.batches: global_batch={batch!r} for data set {name!r} does not divide among {shares.shards} ranks or shards "
                    f"x {shares.rounds} micro batches; use a multiple of {divided}"
                )
            # All shards of an update have one length, so a shorter last batch is left out.
            selections.append(replace(read, batch=batch, drops_last=True))
        seed = spec.train.seed
        parts = [
            self._open_samples(
                selection,
                # Data sets of one length would else be read in one order.
                seed=seed if place == 0 else int(np.random.SeedSequence([seed, place]).generate_state(1)[0]),
                seed_framework=seed_framework,
            )
            for place, selection in enumerate(selections)
        ]
        join = (lambda micros: dict(zip(names, micros, strict=True))) if isinstance(given, Mapping) else tuple
        parts[0].read_with(parts[1:], join)
        return parts[0]

    def _open_stream(self, spec: Spec, shares: Shares, seed_framework: Seed) -> Stream:
        if self.shard is not None and shares.shards != shares.size:
            raise ScriptError(
                f"session.batches: shard= given, which divides a stream among the {shares.size} ranks of this job, but its updates have "
                f"{shares.shards} shards (cluster.shards); leave shard= out, so that each rank reads the stream and keeps its shards"
            )
        if self.shuffle or (self.order or self._read.order) is not None:
            raise ScriptError(
                f"session.batches: {'order=' if self.shuffle is None else 'shuffle='} given with a stream, which has an order of its "
                "own; leave it out"
            )
        if self.workers:
            raise ScriptError(
                f"session.batches: workers={self.workers} given with a stream, which is read in this process; leave workers out"
            )
        stream = Stream(
            self._read.dataset,
            global_batch=spec.train.batch_size,
            seed=spec.train.seed,
            shard=self.shard,
            collate=self.collate or self._read.collate,
            seed_framework=seed_framework,
        )
        if stream.length is None:
            check_schedule(spec, "the stream has no length")
        return stream


def several(dataset: Any) -> Several | None:
    """Return data sets by name, or a tuple of DataLoaders, that a script gives in the place of one data set; None: it is one."""
    if isinstance(dataset, Mapping) and dataset and all(isinstance(name, str) for name in dataset):
        return dataset
    return dataset if isinstance(dataset, tuple) and dataset and all(map(is_loader, dataset)) else None


def values_of(given: Any) -> Sequence[Any]:
    """Return the values that are given by name or by place; of anything else, itself."""
    return list(given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given])


def batches_of(given: Any, names: Sequence[Any]) -> list[Any]:
    """Return ``global_batch`` for each of several data sets, where it is given by name or place.

    Raises:
        ScriptError: it is given otherwise.
    """
    if given is None:
        return [None] * len(names)
    values = given if isinstance(given, Mapping) else dict(enumerate(given)) if isinstance(given, tuple) else {}
    if set(values) != set(names):
        words = ", ".join(f"{name!r}: 32" for name in names)
        raise ScriptError(
            f"session.batches: global_batch={given!r} given with several data sets; expected a number for each, such as {{{words}}}, or "
            "DataLoaders, which say it"
        )
    return [values[name] for name in names]
