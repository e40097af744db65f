"""A kind of task, which ties a data set, a model and an evaluator to a job."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from mtrain.core.interfaces.evaluator import Evaluator
from mtrain.core.interfaces.model import Task, Variation
from mtrain.core.interfaces.tensors import Array, HostBatch

if TYPE_CHECKING:
    from mtrain.core.interfaces.details import Detail
    from mtrain.core.interfaces.live import LiveImages
    from mtrain.core.interfaces.program import ProgramInput
    from mtrain.spec.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of counts for a person to read."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str] | None]
    """The cells of each row; None: a line that separates the rows before and after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A sentence for a person to read."""

    text: str
    good: bool | None = None
    """True: good news; False: something that needs attention; None: neither."""


class JobData(Protocol):
    """The data of a job, in the form that training, evaluation and prediction have in common."""

    def task(self) -> Task:
        """Return the facts from which the model is built."""
        ...

    def sources(self) -> Mapping[str, Any]:
        """Return the splits for the loader: ``train`` (augmented; absent if nothing is trained) and ``val``."""
        ...

    def length(self, split: str) -> int:
        """Return the number of samples of ``train`` or ``val``."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Return the metrics of the data that ``Model.prepare_task`` receives."""
        ...

    def evaluator(self) -> Evaluator:
        """Return a new, empty evaluator for ``val``."""
        ...


class TaskData(JobData, Protocol):
    """The data of a job that trains or evaluates: a data set as one kind of task uses it."""

    def verify(self) -> str:
        """Check every file that may be unreadable, and return a description of what was checked.

        Raises:
            DataError: some files cannot be used; the first ones are named.
        """
        ...

    def labels(self) -> dict[str, Any]:
        """Return the facts about the classes that a checkpoint stores for ``TaskKind.images``, as plain values."""
        ...

    def report(self) -> list[str]:
        """Return one sentence for each kind of problem in the splits."""
        ...

    def describe(self) -> Sequence[Table | Remark]:
        """Return tables and sentences on both splits, for ``mtrain data check``."""
        ...

    def sample_weights(self, metrics: Mapping[str, float]) -> Array | None:
        """Return how often each training sample is drawn relative to the others, float64 (samples,); None: once an epoch.

        It is a pure function of the data and of ``metrics``, those of the last evaluation before the epoch (empty: there
        was none), and is None always or never. With weights, the source receives ``index + k * len(source)`` for
        repetition ``k`` of a sample within an epoch, and varies each repetition differently.

        Raises:
            DataError: no sample could be drawn.
        """
        ...

    def samples_digest(self) -> str:
        """Return a digest of all samples of ``train``, which a resumed job must have again; empty: their number must do."""
        ...

    def unit(self) -> tuple[str, int] | None:
        """Return the word in which the speed of training is told, and how many of it a sample has; None: samples."""
        ...

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield images of up to ``limit`` samples of each split, as they are and as the network receives them.

        Each is (name, caption, uint8 (H, W, 3) RGB).
        """
        ...

    def draw(self, partial: Any, path: Path) -> None:
        """Draw truth beside predictions for some samples of an evaluator's ``partial``, and save it as ``path``."""
        ...

    def details(self, evaluator: Any) -> "Sequence[Detail]":
        """Return charts and matrices of the last result of an evaluator, for the pages of a run; it may be empty.

        ``evaluator``: one of ``evaluator()`` whose ``result`` was called.
        """
        ...


class ImageData(JobData, Protocol):
    """The data of a prediction job: images without labels, as its split ``val``."""

    def write(
        self, partial: Any, out: Path, *, confidence: float, draw: bool, names: Mapping[Path, str] | None = None
    ) -> None:
        """Write the predictions of an evaluator's ``partial`` into the folder ``out``.

        ``predictions.json`` is a list with one entry per prediction of at least ``confidence``, with ``file_name``,
        ``class`` and ``score``. With ``draw`` each image is written too, with its predictions drawn in.

        ``names``: the name of each file in the list; a file without an entry is listed by its path.
        """
        ...


class TaskKind(Protocol):
    """A kind of task: a plugin that decides how data are read, scored and drawn, and what a spec may say about that.

    Models and data sets name it as their ``kind``. Its class derives from ``mtrain.tasks.base.TaskBase``, which has a
    default of every member here but ``images``; importing it imports no framework and no image library, because
    every reading of a spec needs ``sections``. Construct one only through ``rank.spec.assembly``.
    """

    Options: type[BaseModel]
    """No spec has options of a task yet: an empty model."""
    sections: Mapping[str, type["Section"]]
    """The task's own sections of a spec, by their names at the top of the file.

    A class under the name of one of the core's sections, such as ``data``, derives from the core's class and adds keys
    to it; any other name is a section of the task's own. Every key has a default and a description.
    """

    in_ranks: bool
    """Whether only ranks may open the data and the model, because they are a user's own code, which may import a
    framework. The process that starts the ranks then checks what can be seen without running it."""

    def own_code(self, spec: Any) -> Mapping[str, str]:
        """Return the references to the user's own code that the job runs, by the key of the spec that names each."""
        ...

    def refuse(self, spec: Any, *, framework: str) -> None:
        """Refuse a spec that this task cannot follow with a backend on ``framework``; the plan calls it.

        Raises:
            SpecError: it cannot; the message names the key.
        """
        ...

    def divided(self, data: Any, read_all: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Return the training and the evaluation split where ``data``, the section of the spec, divides one set.

        ``read_all`` reads every sample of the data set (split ``all`` of ``Dataset.read``). None: the data set has both
        splits.

        Raises:
            DataError: the set cannot be divided.
        """
        ...

    def prepared(self, data: Any, content: Any) -> Any:
        """Return a split that was read as a job uses it, without the samples that ``data`` leaves out.

        Raises:
            DataError: the split cannot be used as ``data`` requires.
        """
        ...

    def unreadable(self, spec: Any, files: Sequence[Path]) -> Mapping[Path, str]:
        """Return the reason for each of ``files`` on which the task cannot predict, so that a prediction skips it."""
        ...

    def varied(self, batch: HostBatch, *, step: int) -> Sequence[tuple[HostBatch, Variation]]:
        """Return copies of a micro batch for test-time augmentation, the batch itself among them.

        Empty: the task knows none, and ``evaluate.augment`` is refused.

        Args:
            batch: A micro batch of split ``val``.
            step: Number of which the model needs the sides of images to be multiples.
        """
        ...

    def inputs(self, spec: Any) -> "Sequence[ProgramInput]":
        """Return what the task's models read of a batch in evaluation mode, for programs that are exported.

        Empty: they cannot be exported.
        """
        ...

    def preprocessing(self, spec: Any) -> Mapping[str, Any]:
        """Return, as plain values, how an image becomes an input of the size of ``inputs``."""
        ...

    def model_options(self, spec: Any, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options of the model that follow from the task's sections; those that the spec sets replace them.

        ``defaults``: the default of each option that the model has.
        """
        ...

    def __call__(self, spec: Any, data: Any, *, training: bool = True) -> TaskData:
        """Return the data of a job that trains, or with ``training=False`` of one that only evaluates.

        ``data`` is what ``mtrain.tasks.datasets.open_data`` returns. Without ``training`` only the evaluation split is
        read.
        """
        ...

    def images(self, spec: Any, files: Sequence[Path], labels: Mapping[str, Any]) -> ImageData:
        """Return the data of a job that predicts on the images ``files``.

        ``labels``: those that a checkpoint stores (see ``TaskData.labels``), or ``class_names`` alone.

        Raises:
            DataError: some images cannot be read; all of them are named.
        """
        ...

    def live(self, spec: Any, labels: Mapping[str, Any]) -> "LiveImages | None":
        """Return how images in memory are predicted on; None: the task has no way to.

        ``labels``: as for ``images``.
        """
        ...
