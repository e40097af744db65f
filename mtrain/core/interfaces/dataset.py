"""The reader of a data format, and its samples on their way to a rank."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from mtrain.core.interfaces.options import FromOptions
from mtrain.core.interfaces.tensors import Array, HostBatch

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""Name of a split; ``all`` means every image of the data set, which ``data.split`` divides afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRequest:
    """A split to read, as a spec describes it."""

    split: Split
    """``all``, which is requested if the spec sets ``data.split``, means every image of ``data.train``, or every image
    there is if ``data.train`` is not set."""
    root: Path | None = None
    """``data.root``."""
    value: str | None = None
    """``data.<split>``; what it means is the reader's own."""
    images: str | None = None
    """``data.images``."""
    names: Sequence[str] | None = None
    """``data.names``."""


class Dataset(FromOptions, Protocol):
    """A reader of one data format: the target of one ``mtrain.datasets`` entry point, made as ``Dataset(options)``.

    A plugin class derives from it and so has the defaults below.
    """

    kind: ClassVar[str]
    """Name of the task plugin that its data are for."""
    made_on_first_use: ClassVar[bool] = False
    """Whether the plugin makes the data itself. ``data.root`` may then be missing before the first job, and may differ
    between hosts until then."""
    classes_of_train: ClassVar[bool] = False
    """Whether the training split alone says which classes there are. The evaluation split is then read with the class
    names of the training split as its ``names``."""

    @abstractmethod
    def read(self, request: SplitRequest) -> Any:
        """Read one split. The result has a length and ``class_names``; its form is otherwise that of the task's kind.

        Raises:
            DataError: the files are missing, unreadable or disagree with the spec.
        """
        ...


class Source(Protocol):
    """The samples of one split, as a pure function of epoch and index that never depends on rank, size or worker."""

    def __len__(self) -> int: ...

    def sample(self, epoch: int, index: int, *, update: int = 0) -> Any:
        """Return one sample.

        Augmentation is drawn by (seed, epoch, index); properties that all samples of an update share, such as their
        size, by (seed, epoch, update).
        """
        ...

    def collate(self, samples: Sequence[Any]) -> dict[str, Array]:
        """Join samples to a micro batch. Its array ``index`` (int64) holds the numbers of the samples."""
        ...


@runtime_checkable
class Loader(Protocol):
    """The micro batches of this rank, in the order of the job. Resuming in mid-epoch takes no extra time."""

    updates_per_epoch: int

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """Yield ``accumulate`` micro batches for each update from ``start`` to the end of the epoch.

        Each holds ``epoch`` (int64, shape (1,)), for models whose training changes over the epochs. In training it also
        holds ``random_key`` (int32, one for each sample), from which ``nn.Dropout`` makes its random bits: see
        ``core.network.noise``.
        """
        ...

    def close(self) -> None:
        """End worker processes and release shared memory. It may be called twice."""
        ...
