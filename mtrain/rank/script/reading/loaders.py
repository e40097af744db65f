"""DataLoaders of torch and Paddle: which samples they read in which order, so that mtrain divides them among the ranks."""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from mtrain.errors import ScriptError

Shard = Callable[[int, int], Iterable[Any]]
"""Maps (rank, number of ranks) to the part of a stream that this rank reads."""
BatchOf = Callable[[int], int]
"""Maps an epoch to the samples of each of its updates."""
Order = Callable[[int], Sequence[int]]
"""Maps an epoch to the numbers of its samples."""
Batches = Callable[[int], Sequence[Sequence[int]]]
"""Maps an epoch to the numbers of the samples of each of its updates."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which samples of a data set are read, in which order and batches, as a DataLoader or a script says."""

    dataset: Any
    batch: Any = None
    """Samples of an update, or a ``BatchOf``; None: not said. Not used with ``batches``."""
    order: Order | None = None
    """The script's own; None: mtrain's, or that of a stream."""
    batches: Batches | None = None
    """Of the script's own batch sampler, in place of both."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """None: stacking."""
    workers: int = 0
    drops_last: bool = True
    """Whether a last shorter batch of an epoch is left out."""


def is_stream(dataset: Any, shard: Shard | None = None) -> bool:
    """Return whether a data set has to be read as a stream, because it has no items by number."""
    if shard is not None or not hasattr(dataset, "__getitem__"):
        return True
    # The frameworks' classes for streams inherit a __getitem__ that only raises an error.
    inherited = getattr(type(dataset).__getitem__, "__qualname__", "") in (
        "Dataset.__getitem__",
        "IterableDataset.__getitem__",
    )
    return hasattr(dataset, "__iter__") and (inherited or not hasattr(dataset, "__len__"))


def read_loader(dataset: Any, *, call: str) -> Selection:
    """Return what a DataLoader says; of anything else, that it is the data set.

    Raises:
        ScriptError: the loader's data set makes batches itself.
    """
    if not is_loader(dataset):
        return Selection(dataset=dataset)
    loader = dataset
    collate = loader.collate_fn
    if getattr(collate, "__name__", "").startswith("default_"):
        collate = None
    read = Selection(dataset=loader.dataset, collate=collate, workers=loader.num_workers)
    batches = loader.batch_sampler
    if batches is None:
        raise ScriptError(
            f"{call}: a DataLoader with batch_size=None given, whose data set makes batches itself; give a data set of single "
            "samples, and their number in a batch"
        )
    if is_stream(loader.dataset):
        return replace(read, batch=loader.batch_size)
    if _is_of_framework(batches, "BatchSampler"):
        order = order_of(batches.sampler, len(loader.dataset))
        return replace(read, batch=int(batches.batch_size), order=order, drops_last=bool(batches.drop_last))
    if _is_of_framework(batches, "DistributedBatchSampler"):
        # Of Paddle: a rank's part of each batch. With one replica it makes whole batches, which mtrain divides itself.
        batches = type(batches)(
            batches.dataset,
            batches.batch_size,
            num_replicas=1,
            rank=0,
            shuffle=batches.shuffle,
            drop_last=batches.drop_last,
        )
    order = SamplerOrder(batches, lambda asked: [number for batch in asked for number in batch])
    lists = SamplerBatches(batches, lambda asked: [list(batch) for batch in asked])
    return replace(read, batch=max(1, len(lists.first())), order=order, batches=lists)


def is_loader(dataset: Any) -> bool:
    """Return whether an object is a DataLoader of torch or Paddle."""
    # By name, because importing a framework to ask for its class would bring the other one into this process.
    classes = {(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(dataset).__mro__}
    return bool(classes & {("DataLoader", "torch"), ("DataLoader", "paddle")})


def evaluation_part(read: Selection) -> Any:
    """Return the data set of which an evaluation takes each sample once: the samples that the loader's sampler gives."""
    if read.order is None:
        return read.dataset
    numbers = list(read.order(0))
    return read.dataset if sorted(numbers) == list(range(len(read.dataset))) else Subset(read.dataset, numbers)


class Subset:
    """Some samples of a data set."""

    def __init__(self, dataset: Any, numbers: Sequence[int]) -> None:
        self._dataset, self._numbers = dataset, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._numbers[index]]


def order_of(sampler: Any, length: int) -> Order | None:
    """Return the order of a sampler over all ranks; None: each sample once in random order, which is mtrain's own."""
    if _is_of_framework(sampler, "SequentialSampler", "SequenceSampler"):
        return lambda epoch: range(length)
    if _is_of_framework(sampler, "RandomSampler") and not sampler.replacement and len(sampler) == length:
        return None
    if _is_of_framework(sampler, "DistributedSampler"):
        # Rank r reads every size-th sample from r on, so the ranks' batches together are neighbours in the order of one rank.
        settings = {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
        sampler = type(sampler)(sampler.dataset, num_replicas=1, rank=0, **settings)
    return SamplerOrder(sampler, list)


def _is_of_framework(sampler: Any, *names: str) -> bool:
    """Return whether a sampler is of one of these classes of torch or Paddle, and not of one derived from it."""
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.partition(".")[0] in ("torch", "paddle")


Given = TypeVar("Given")


class SamplerOrder(Generic[Given]):
    """What a sampler gives that is asked anew in each epoch, so that it is a function of the epoch.

    The sampler is told the epoch by ``set_epoch``, and a generator of its own is seeded by its first seed and the epoch.
    """

    def __init__(self, sampler: Iterable[Any], given: Callable[[Iterable[Any]], list[Given]]) -> None:
        """``given`` reads the sampler from its beginning to its end."""
        self._sampler = sampler
        self._given = given
        self._parts: list[Any] = [part for part in (sampler, getattr(sampler, "sampler", None)) if part is not None]
        # A generator is seeded by its first seed and the epoch, since where it stands is not known after a resume.
        self._generators: list[tuple[Any, int]] = [
            (part.generator, int(part.generator.initial_seed()))
            for part in self._parts
            if hasattr(getattr(part, "generator", None), "initial_seed")
        ]

    def __call__(self, epoch: int) -> list[Given]:
        """Return what the sampler gives in ``epoch``."""
        self._turn_to(epoch)
        return self._given(self._sampler)

    def _turn_to(self, epoch: int) -> None:
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for generator, seed in self._generators:
            generator.manual_seed((seed + epoch) % 2**63)


class SamplerBatches(SamplerOrder[list[int]]):
    """The batches of a batch sampler, asked anew in each epoch."""

    def count(self, epoch: int) -> int | None:
        """Return how many batches the sampler says that ``epoch`` has; None: it does not say."""
        self._turn_to(epoch)
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    def first(self) -> list[int]:
        """Return the first batch of epoch 0, empty where it has none."""
        self._turn_to(0)
        return list(next(iter(self._sampler), []))
