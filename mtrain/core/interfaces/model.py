"""The description of a network, and the facts from which it is built."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mtrain.core.interfaces.collective import Collective
from mtrain.core.interfaces.options import FromOptions
from mtrain.core.interfaces.program import Program
from mtrain.core.interfaces.tensors import Array, HostBatch, Module, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The facts about the data and the job from which a model is built."""

    kind: str
    """Kind of the task. The data set and the model of one job must be of the same kind."""
    class_names: Sequence[str]
    image_size: int
    """Side of the square input, in pixels; 0: the input of the task's networks has none."""
    global_batch: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the data with which the model's network is built; ``Model.prepare_task`` adds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitation:
    """A teacher, and how much imitating it counts. A network has it as its attribute ``imitation``.

    The teacher is no part of the network's state: it is neither trained nor averaged nor saved.
    """

    teacher: Module
    """A network in evaluation mode, without gradients; its method ``signals(batch)`` shows what is imitated."""
    labels: float = 1.0
    """Factor of the loss on the data's own labels."""
    outputs: float = 1.0
    """Factor of the loss between the outputs of both."""
    features: float = 0.0
    """Factor of the loss between the attention maps of both."""
    temperature: float = 1.0
    """Number by which class logits are divided before they are compared as probabilities."""

    def seen(self, batch: Any) -> Any:
        """Return the teacher's signals for a micro batch."""
        signals: Any = self.teacher
        return signals.signals(batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How a copy of a micro batch's images differs from them, for test-time augmentation."""

    mirrored: bool
    """Left and right are exchanged."""
    scale: float
    """Size of the content relative to the original; the rest of the copy is padding on the right and below."""
    width: int
    """Width of the original in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """How weight files that others publish for a model differ from the model's state in mtrain.

    It need not list how each framework spells names: that is known. Patterns are regexes searched in neutral names.
    """

    left_out: Sequence[str] = ()
    """Patterns of entries that published files do not contain."""
    float32: Sequence[str] = ()
    """Full names (no patterns) of integer entries that are published as float32."""
    per_class: Sequence[str] = ()
    """Patterns of entries whose shape depends on the number of classes."""
    of_data: Sequence[str] = ()
    """Patterns of entries that are computed from a job's data: training keeps its own, evaluation takes the file's."""
    renamed: Sequence[tuple[str, str]] = ()
    """(pattern, replacement) for names that the model does not have: what older files, or a second name of the same
    array, are called. All are applied, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFolder:
    """A request to write trained weights as a folder that other libraries read."""

    path: Path
    arrays: Mapping[str, Array]
    """The weights, under the names of the module's ``state_dict``."""
    labels: Mapping[str, Any]
    """What the checkpoint stores on its data."""
    merge: bool = False
    """Whether adapters are added to the weights that they were trained on."""
    force: bool = False
    """Whether files in the folder are replaced."""
    max_file_bytes: float = 5e9
    """Weights that are larger are divided among several files with an index."""


class Model(FromOptions, Protocol):
    """The description of a network: the target of one ``mtrain.models`` entry point, constructed as ``Model(options)``.

    It is not a network itself; ``build`` returns one. Importing its Python module must not import the network's code,
    because ``core.nn`` is bound only inside a rank. A plugin class derives from ``Model`` and so has the defaults below.
    """

    kind: ClassVar[str]
    """Name of the task plugin whose data the model learns."""
    size_step: int = 0
    """Number of which both sides of an image must be multiples; 0: the network takes one size only."""
    native: ClassVar[bool] = False
    """Whether ``build`` returns a user's native module, which keeps its own start values; see ``Recipe.own_model``."""
    float64: ClassVar[bool] = True
    """Whether its losses can be computed in float64. If not, a job in that precision is refused, and the kit tests in float32."""
    spans_ranks: ClassVar[bool] = False
    """Whether its losses use the collective that ``build`` receives. Ranks then compute one shard in each pass, see
    ``core.samples.sampler.Shares``."""
    imitates: ClassVar[Sequence[str]] = ()
    """What its network can imitate of a teacher, and show to a student: ``outputs``, ``features`` or both.

    The network then derives from ``models.common.imitation.Imitator``.
    """
    recomputable: ClassVar[Sequence[str]] = ()
    """Regexes of names of the submodules that ``train.recompute: true`` recomputes, and ``train.compile: blocks`` compiles;
    none: the spec has to name them, and cannot compile by block."""
    published: ClassVar[Published] = Published()
    """How weight files that others publish for the model differ from its state; by default they do not."""

    @abstractmethod
    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Return ``task`` with the details added that depend on the data. Uses numpy only; equal on every rank."""
        ...

    def check_resumed(self, details: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from which the model cannot go on, although its arrays may fit.

        Called before the ranks start and by each of them. The default refuses nothing.

        Args:
            details: Those of the job's task, see ``prepare_task``.
            saved: Those of the task that wrote the checkpoint.

        Raises:
            CheckpointError: the model computes with something else than the checkpoint's job did.
        """
        return

    def check_libraries(self) -> None:
        """Refuse what the libraries of this Python cannot build, without importing a framework. The default refuses nothing.

        Called before the ranks start, where they have the Python of the process that starts them.

        Raises:
            SpecError: a library does not know what the options name.
        """
        return

    def check_framework(self, framework: str) -> None:
        """Refuse a backend's framework on which the model cannot be built; called before the ranks join.

        The default refuses nothing: models on ``core.nn`` run on every framework.

        Raises:
            SpecError: the model is of another framework.
        """
        return

    @abstractmethod
    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network as a native module of the bound framework.

        In training mode ``module(batch)`` returns a dict of scalar losses, of which only ``"total"`` carries a
        gradient; in evaluation mode it returns a dict of tensors whose first axis is the batch.

        ``collective`` is for metrics that a loss needs from all ranks; in training mode every rank calls the module
        equally often.
        """
        ...

    def operations(self, task: Task, *, rows: int, frozen: Sequence[str]) -> int | None:
        """Return the floating-point operations of ``rows`` samples, forward and backward; None, the default: not known.

        ``frozen``: patterns of what is not trained, as in ``train.freeze``. A rank calls it.
        """
        return None

    def check_program(self, program: Program) -> None:
        """Refuse a program for inference as which the network cannot be written; called before a rank starts.

        The default refuses nothing.

        Raises:
            SpecError: It cannot be written so.
        """
        return

    def entries(self, task: Task) -> Mapping[str, tuple[tuple[int, ...], str]] | None:
        """Return shape and type of each entry of the network's state, for a ``native`` model that can say it.

        It is called in a process of its own, which may import the model's framework. None, the default: only ranks know.
        """
        return None

    def arranged(self, batch: HostBatch) -> HostBatch:
        """Return a micro batch of training as the network takes it, before it is sent to the device.

        What the network would have to read from the device is worked out here. The network must take ``batch`` itself,
        too. The default returns ``batch``.
        """
        return batch

    @abstractmethod
    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Return the start values of every weight and buffer, drawn by (seed, name), so equal on every framework."""
        ...

    def narrowed(self, output: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Leave out of the output of evaluation mode, on the device, what ``predictions`` would drop.

        It is called where the output would have to be downloaded; ``predictions`` must return the same. The default
        leaves out nothing.
        """
        return output

    @abstractmethod
    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Any]:
        """Turn the output of evaluation mode into one picklable value per sample, for the evaluator."""
        ...

    def joined(self, outputs: Sequence[tuple[Mapping[str, Array], Variation]]) -> Mapping[str, Array]:
        """Turn the outputs for varied copies of one micro batch into one output, as for the micro batch itself.

        The default cannot: ``evaluate.augment`` is refused for the model.
        """
        raise NotImplementedError

    def write_folder(self, request: WeightsFolder) -> str | None:
        """Write trained weights as a folder; return words on its files and on who reads them, for a person.

        None, the default: no library reads such a folder.

        Raises:
            UsageError: The folder cannot be written, or does not suit the options.
        """
        return None

    @staticmethod
    def fused(arrays: Mapping[str, Array]) -> Mapping[str, Array] | None:
        """Return the state of the network's form for inference, made from its whole state ``arrays``.

        None, the default: the model has no such form.
        """
        return None
