"""The interfaces between mtrain and its plugins: backends, models, data sets, tasks, launchers and clusters.

Read it top to bottom: the values that are passed between them (Recipe, State, Progress, Command), then what a backend
implements (Collective, Optimizer, RankSession, Backend), then what a task implements (Model, Dataset, Evaluator, and
TaskKind, which ties them to a job), then what starts the ranks (Launcher on one host, Cluster on several). Nothing here
names a particular backend, framework or kind of task.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from pydantic import BaseModel

T = TypeVar("T")
Tensor: TypeAlias = Any
"""A tensor of the framework that this process has bound (see ``core.binding``)."""
Module: TypeAlias = Any
"""A native module of the framework that this process has bound: ``torch.nn.Module`` or ``paddle.nn.Layer``."""
if TYPE_CHECKING:  # numpy takes 0.1 s to import, and `mtrain plan` needs these names only
    import numpy as np

    from mtrain.core.details import Detail
    from mtrain.core.live import LivePictures
    from mtrain.core.program import Program, ProgramInput
    from mtrain.core.queue import Queue
    from mtrain.spec.section import Section

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = Any
HostBatch: TypeAlias = Mapping[str, Array]
"""One micro batch as numpy arrays in host memory, as a loader yields it."""
Batch: TypeAlias = Mapping[str, Tensor]
"""One micro batch as tensors on the device, as a model receives it."""
Precision: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]


# ------------------------------------------------------------------------------------------------ values that travel
@dataclass(frozen=True, kw_only=True, slots=True)
class Quantise:
    """How layers learn to compute with 8 bits; see ``core.quantising``."""

    start: int = 0
    """The first update, from 0, that observes the ranges of inputs; the next ones round weights and inputs."""
    freeze: int | None = None
    """The ranges stay as they are from this update on; None: they move to the end."""
    exclude: Sequence[str] = ()
    """Regexes of names of layers that are not rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """Zeros and an L1 penalty while training; see ``core.masking``. ``Rates.sparsity`` has the schedule."""

    sparsity: float = 0.0
    """Share of each pruned array that is 0 at the end; 0: there are no masks."""
    match: str = ""
    """Regex searched in the names of the parameters with two or more axes; '' prunes all of them."""
    norm_l1: float = 0.0
    """Weight of the L1 penalty on the scales of BatchNorms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Every setting that affects gradients or weights. It is fixed before the model is built."""

    rule: Literal["sgd", "adam", "adamw", "lion", "rmsprop", "adadelta", "lamb"]
    groups: Sequence[tuple[str, Mapping[str, float]]]
    """Parameter groups as (regex searched in the parameter name, options); the first group that matches a name takes
    it.

    The options are weight_decay, momentum, nesterov (0/1), beta1, beta2, eps. Groups are chosen by name and not by
    shape, because a ZeRO-3 shard does not have its parameter's shape.
    """
    frozen: Sequence[str] = ()
    """Regexes; parameters whose name matches one are not trained. A BatchNorm with a frozen weight normalises with its
    running statistics."""
    micro_batch: int
    """Samples per rank per forward pass."""
    accumulate: int = 1
    """Forward passes of each rank per update."""
    shards: int | None = None
    """Equal parts of each micro batch of the job, which the ranks share out: see ``core.sampler.Shares``. None: one per
    rank."""
    precision: Precision = "fp32"
    """Number type of the forward and backward pass. ``fp64`` serves to show that two backends compute the same."""
    clip_norm: float = float("inf")
    """Largest global L2 norm of the gradient; inf: no limit."""
    ema_decay: float = 0.0
    """Decay of the weight average (EMA) per update; 0: no average is kept."""
    ema_ramp: float = 2000.0
    """Length of the decay's rise in updates: after update k it is ``ema_decay * (1 - exp(-k / ema_ramp))``; 0: none."""
    ema_rule: Literal["ramp", "threshold"] = "ramp"
    """Formula by which the decay rises: see ``core.recipe.ema_shares``."""
    sync_batchnorm: bool = False
    quantise: Quantise | None = None
    """None: no layer is rounded."""
    prune: Pruning | None = None
    """None: no weight is set to 0 and no penalty is applied."""
    recompute: Sequence[str] = ()
    """Regexes of names of submodules whose inner results are computed again in the backward pass; see
    ``core.recomputing``. Of submodules inside each other only the outermost is."""
    channels_last: bool = False
    kernels: Literal["auto", "framework"] = "auto"
    """``auto``: mtrain's own kernels where they can be used; ``framework``: the framework's alone."""
    compile: bool = False
    own_model: bool = False
    """The model is a user's native module and not one built from ``core.nn``. It is built whole, keeps its layers as
    they are, and may return anything and leave out parameters in some updates."""
    native_optimizer: Callable[[Any], Any] | None = None
    """Makes an optimizer of the framework for the model, in the place of ``rule``; a backend that splits arrays refuses
    it."""
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class State:
    """Weights and optimizer state as whole numpy arrays, with the same names and shapes for every backend."""

    weights: dict[str, Array] = field(default_factory=dict)
    """Parameters and buffers. Where buffers differ between ranks, rank 0's are taken."""
    ema: dict[str, Array] = field(default_factory=dict)
    """Averaged parameters and float buffers but ``core.quantising.RANGE``; empty without EMA."""
    moments: dict[str, Array] = field(default_factory=dict)
    """``<moment>/<parameter name>``, see ``core.recipe.MOMENTS``."""
    counters: dict[str, float] = field(default_factory=dict)
    """``updates`` (optimizer steps taken), ``skipped``, ``skipped_in_a_row``, ``loss_scale``, ``loss_scale_age``."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a job has come. ``update`` is the next update to run; it is number ``position`` of epoch ``epoch``."""

    update: int = 0
    epoch: int = 0
    position: int = 0
    best: float = float("-inf")
    best_epoch: int = -1
    epochs_without_gain: int = 0
    scored_update: int = -1
    """Value of ``update`` at the last evaluation; -1: none so far."""
    samples: int = 0
    skipped: int = 0
    """Updates that were not applied because their gradient was not finite."""
    skipped_in_a_row: int = 0


Why = Literal["due", "best", "requested", "ending"]
"""Why a checkpoint is written: the spec says so, its score is the best so far, somebody asked for it (SIGUSR1), or the
job ends because it was asked to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The learning rates and the momentum of one update, as the schedule sets them."""

    rates: Sequence[float]
    """Learning rate of each group of the recipe, in its order."""
    momentum: float | None = None
    """Momentum (sgd, rmsprop) or beta1 (others) that replaces the one of every group; None: each group keeps its own."""
    sparsity: float | None = None
    """Share of each pruned array that is to be 0 after this update; None: the masks stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One process to start on one host: data that is printed by ``mtrain plan`` and run by ``mtrain train``."""

    host: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables set for the process, in addition to the cleaned environment of the caller."""
    stdin: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine of a job."""

    address: str
    slots: int = 1
    """Number of ranks on this host."""


# -------------------------------------------------------------------------------------------- what a backend supplies
class Collective(Protocol):
    """Communication among the ranks of one job. Every rank must make the same calls in the same order."""

    rank: int
    local_rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """Reduce ``x`` over all ranks, element by element, and return a new tensor, equal on every rank.

        The result carries no gradient. A numpy array is reduced on the host, without waiting for the device, and the
        result is a numpy array.
        """
        ...

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, ordered by rank. Any picklable value is accepted."""
        ...


class Optimizer(Protocol):
    """An update rule bound to one model, with its loss scaling, gradient exchange between ranks, clipping and EMA."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The names of the parameters in each group of the recipe, in model order."""
        ...

    def micro_batch(self, *, last: bool, moves_buffers: bool = True) -> AbstractContextManager[None]:
        """Return a context that surrounds forward and backward of one micro batch.

        Args:
            last: It is the last micro batch of the update, in whose backward pass gradients are exchanged.
            moves_buffers: False: afterwards the buffers of the model, such as running statistics, are as they were.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, divided by ``accumulate``, to what has been summed up so far.

        ``loss`` is the mean over this micro batch.
        """
        ...

    def step(self, rates: Rates) -> float:
        """Do one update: average over ranks, clip, apply, zero, EMA. Return the gradient norm before clipping.

        If the norm is not finite, weights, moments and EMA stay as they are, and that norm is returned.
        """
        ...

    def step_later(
        self, rates: Rates, numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> Callable[[], tuple[float, Array]]:
        """Do one update as ``step`` does, without waiting for the device; only where ``RankSession.late`` is True.

        Args:
            rates: rates and momentum of the update.
            numbers: figures of this rank that the host knows.
            tensors: figures of this rank on the device, each of one element.

        Returns:
            A function that waits for the device, and returns the norm and the means over ranks of ``numbers`` and
            ``tensors``, float64. Call it after the next update was started, when the device has work to go on with.
        """
        ...

    def seed_shard(self, shard: int) -> None:
        """Seed the model's randomness by (seed, update, share of the global batch); see ``core.update``.

        Sessions of users' scripts call it before each micro batch. ``step`` does the same for the next update.
        """
        ...

    def seed_value(self, value: int) -> None:
        """Seed the framework's random generators of this rank with ``value``."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model of every rank holds the EMA weights and the buffers of rank 0."""
        ...


Narrow = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Type of ``Model.narrowed``. A session whose device is the CPU need not take it."""


class RankSession(Protocol):
    """One rank of a running job: what ``with backend as session:`` binds. Nothing of it may be used afterwards.

    A class that has all members need not be derived from this one. Members that are not abstract, ``late``, ``fast_bf16``,
    ``time_waits`` and ``export``, are inherited, and given to a session of another class that lacks them.
    """

    if TYPE_CHECKING:  # at run time these are plain attributes, so that derived classes can assign them

        @property
        def collective(self) -> Collective:
            """Communication among the ranks of the job."""
            ...

        @property
        def device(self) -> str:
            """This rank's device, for display: ``cpu``, or ``cuda:1 (NVIDIA H100)``."""
            ...

    else:
        collective: Collective
        device: str

    late: bool = False
    """Whether the trainer is to read the figures of an update one update later (``Optimizer.step_later``), so that it
    does not wait for the device in mid-update; ``prepare`` sets it."""

    @abstractmethod
    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """Build the model, place it on this rank's device and bind the recipe to it. Every rank must call.

        Raises:
            SpecError: ``Backend.check`` refuses the recipe, or it cannot be followed on this rank's device.
        """
        ...

    @abstractmethod
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        """Yield the micro batches of ``loader`` as device tensors, prefetched where the device allows."""
        ...

    @abstractmethod
    def infer(self, model: Module, batch: Batch, *, narrow: Narrow | None = None) -> dict[str, Array]:
        """Run the model on one batch and return its outputs, changed by ``narrow`` on the device, as numpy arrays.

        Nothing is exchanged between ranks and no gradient is kept. The pass has the recipe's precision; half-precision
        results become float32. The caller must have put the model into evaluation mode.
        """
        ...

    @abstractmethod
    def state(self, model: Module, optimizer: Any) -> State:
        """Return copies of weights and optimizer state as whole arrays under neutral names. Every rank must call.

        ``model`` and ``optimizer`` are those that ``prepare`` returned. Every rank gets the whole state and may drop
        it.
        """
        ...

    @abstractmethod
    def restore(self, model: Module, optimizer: Any, state: State) -> None:
        """Load ``state`` into model and optimizer, as ``prepare`` returned them. Every rank must call.

        A part of ``state`` that is empty leaves the current values, except that an empty ``ema`` restarts the average
        from the weights.
        """
        ...

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """Return measurements of this rank.

        ``memory_bytes`` is its peak on its device (resident set size on a CPU), ``device_free_bytes`` what it could have
        of a GPU. ``communication_s`` is there after
        ``time_waits``, where waiting can be measured: the total time in seconds in which this rank has done nothing but
        wait for other ranks.
        """
        ...

    def fast_bf16(self) -> bool:
        """Return whether this rank's device computes bf16 faster than fp32, for ``train.precision: auto``.

        The default says no.
        """
        return False

    def time_waits(self) -> None:
        """Measure from now on how long this rank waits for others; see ``measure``.

        It is called before ``prepare``, and only if a comparison or ``report.metrics_port`` needs it. The default measures nothing.
        """
        return

    def export(self, build: Callable[[], Module], weights: Mapping[str, Array], program: "Program") -> Sequence[str]:
        """Write a model in evaluation mode as a program that needs nothing of mtrain.

        Only ``mtrain export`` calls it, in place of ``prepare``. The default writes nothing.

        Args:
            build: Builds the network.
            weights: Its whole state.
            program: What to write, and where.

        Returns:
            The names of the program's outputs, in order; none if this session writes no such program.
        """
        return ()


class Backend(Protocol):
    """A way of training on many ranks: the target of one ``mtrain.backends`` entry point.

    It is constructed as ``Backend(options)``. Its module must not import a framework before ``nn``, ``ops`` or ``with``
    is used. All members are valid at any time; those that need the other ranks are in the ``RankSession`` that
    ``with backend as session:`` binds.

    A class that has all members need not be derived from this one. A class that is derived from it inherits the members
    that are not abstract: ``check``.
    """

    Options: ClassVar[type[BaseModel]]
    framework: str
    """The framework whose ``nn`` and ``ops`` this backend uses: "torch" or "paddle"."""
    rendezvous: str
    """The way its ranks find each other, which the launcher must provide: "none", "torch", "horovod" or "paddle"."""

    @property
    @abstractmethod
    def nn(self) -> ModuleType:
        """The framework's neutral layers (``core/nn.pyi``)."""
        ...

    @property
    @abstractmethod
    def ops(self) -> ModuleType:
        """The framework's neutral functions (``core/ops.pyi``)."""
        ...

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """Refuse a recipe that this backend cannot follow. The default refuses nothing.

        The plan calls it, so that the job is refused before a rank starts; it must not import a framework.
        ``RankSession.prepare`` refuses the same recipes, because only a rank knows its device for certain.

        Args:
            recipe: The recipe of the job.
            size: Number of ranks.
            on_cpu: Whether it is certain that they compute on the CPU.

        Raises:
            SpecError: The backend cannot follow the recipe; the message names the key of the spec.
        """
        return

    @abstractmethod
    def __enter__(self) -> RankSession:
        """Join the other ranks and return this rank's session. Every rank must call."""
        ...

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Leave the other ranks, without waiting for them after an error, and release what the session holds."""
        ...


# ------------------------------------------------------------------------------------------------- what a task supplies
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
    """Figures of the data with which the model's network is built; ``Model.prepare_task`` adds them."""


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
    """How a copy of a micro batch's pictures differs from them, for test-time augmentation."""

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


class Model(Protocol):
    """The description of a network: the target of one ``mtrain.models`` entry point, constructed as ``Model(options)``.

    It is not a network itself; ``build`` returns one. Importing its Python module must not import the network's code,
    because ``core.nn`` is bound only inside a rank. A plugin class derives from ``Model`` and so has the defaults below.
    """

    Options: ClassVar[type[BaseModel]]
    kind: ClassVar[str]
    """Name of the task plugin whose data the model learns."""
    size_step: int = 0
    """Number of which both sides of a picture must be multiples; 0: the network takes one size only."""
    native: ClassVar[bool] = False
    """Whether ``build`` returns a user's native module, which keeps its own start values; see ``Recipe.own_model``."""
    spans_ranks: ClassVar[bool] = False
    """Whether its losses use the collective that ``build`` receives. Ranks then compute one shard in each pass, see
    ``core.sampler.Shares``."""
    imitates: ClassVar[Sequence[str]] = ()
    """What its network can imitate of a teacher, and show to a student: ``outputs``, ``features`` or both.

    The network then derives from ``models.common.imitation.Imitator``.
    """
    recomputable: ClassVar[Sequence[str]] = ()
    """Regexes of names of the submodules that ``train.recompute: true`` recomputes; none: the spec has to name them."""
    published: ClassVar[Published] = Published()
    """How weight files that others publish for the model differ from its state; by default they do not."""

    @abstractmethod
    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Return ``task`` with the details added that depend on the data. Uses numpy only; equal on every rank."""
        ...

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

        ``collective`` is for figures that a loss needs from all ranks; in training mode every rank calls the module
        equally often.
        """
        ...

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

    @staticmethod
    def fused(arrays: Mapping[str, Array]) -> Mapping[str, Array] | None:
        """Return the state of the network's form for inference, made from its whole state ``arrays``.

        None, the default: the model has no such form.
        """
        return None


class Evaluator(Protocol):
    """Collects the predictions of a whole evaluation set and turns them into figures."""

    figures: ClassVar[Sequence[str]]
    """Names of the figures that ``result`` returns; a figure of a single class is named ``<figure>/<class>``."""
    headline: ClassVar[Sequence[str]]
    """The few figures that get a column or a curve, the most informative first."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the predictions of one micro batch; ``batch["index"]`` holds the numbers of its samples."""
        ...

    def partial(self) -> Any:
        """Return everything that this rank has collected, as a picklable value."""
        ...

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Compute the figures from the ``partial`` of every rank; ``"score"`` is the one to maximise.

        A sample that was evaluated twice counts once.
        """
        ...

    def remarks(self) -> list[str]:
        """Return sentences on the last result that no single figure expresses; the list may be empty."""
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


class Dataset(Protocol):
    """A reader of one data format: the target of one ``mtrain.datasets`` entry point, made as ``Dataset(options)``.

    A plugin class derives from it and so has the defaults below.
    """

    Options: ClassVar[type[BaseModel]]
    kind: ClassVar[str]
    """Name of the task plugin that its data are for."""
    made_on_first_use: ClassVar[bool] = False
    """Whether the plugin makes the data itself. ``data.root`` may then be missing before the first job, and may differ
    between hosts until then."""
    classes_of_train: ClassVar[bool] = False
    """Whether the training split alone says which classes there are. The evaluation split is then read with the class
    names of the training split as its ``names``."""

    @abstractmethod
    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Literal["train", "val", "test", "all"],
    ) -> Any:
        """Read one split. The result has a length and ``class_names``; its form is otherwise that of the task's kind.

        The arguments are ``data.root``, ``data.<split>``, ``data.images`` and ``data.names`` of the spec. Split
        ``all``, which is requested if the spec sets ``data.split``, means every picture of ``data.train``, or every
        picture there is if ``data.train`` is not set.

        Raises:
            DataError: the files are missing, unreadable or disagree with the spec.
        """
        ...


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
        """Return the figures of the data that ``Model.prepare_task`` receives."""
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
        """Return the facts about the classes that a checkpoint stores for ``TaskKind.pictures``, as plain values."""
        ...

    def report(self) -> list[str]:
        """Return one sentence for each kind of problem in the splits."""
        ...

    def describe(self) -> Sequence[Table | Remark]:
        """Return tables and sentences on both splits, for ``mtrain data check``."""
        ...

    def sample_weights(self, figures: Mapping[str, float]) -> Array | None:
        """Return how often each training sample is drawn relative to the others, float64 (samples,); None: once an epoch.

        It is a pure function of the data and of ``figures``, those of the last evaluation before the epoch (empty: there
        was none), and is None always or never. With weights, the source receives ``index + k * len(source)`` for
        repetition ``k`` of a sample within an epoch, and varies each repetition differently.

        Raises:
            DataError: no sample could be drawn.
        """
        ...

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield pictures of up to ``limit`` samples of each split, as they are and as the network receives them.

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


class PictureData(JobData, Protocol):
    """The data of a prediction job: pictures without labels, as its split ``val``."""

    def write(
        self, partial: Any, out: Path, *, confidence: float, draw: bool, names: Mapping[Path, str] | None = None
    ) -> None:
        """Write the predictions of an evaluator's ``partial`` into the folder ``out``.

        ``predictions.json`` is a list with one entry per prediction of at least ``confidence``, with ``file_name``,
        ``class`` and ``score``. With ``draw`` each picture is written too, with its predictions drawn in.

        ``names``: the name of each file in the list; a file without an entry is listed by its path.
        """
        ...


class TaskKind(Protocol):
    """A kind of task: a plugin that decides how data are read, scored and drawn, and what a spec may say about that.

    Models and data sets name it as their ``kind``. Its class derives from ``mtrain.tasks.base.TaskBase``, which has a
    default of every member here but ``pictures``; importing it imports no framework and no picture library, because
    every reading of a spec needs ``sections``. Construct one only through ``rank.assembly``.
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
            step: Number of which the model needs the sides of pictures to be multiples.
        """
        ...

    def inputs(self, spec: Any) -> "Sequence[ProgramInput]":
        """Return what the task's models read of a batch in evaluation mode, for programs that are exported.

        Empty: they cannot be exported.
        """
        ...

    def preprocessing(self, spec: Any) -> Mapping[str, Any]:
        """Return, as plain values, how a picture becomes an input of the size of ``inputs``."""
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

    def pictures(self, spec: Any, files: Sequence[Path], labels: Mapping[str, Any]) -> PictureData:
        """Return the data of a job that predicts on the pictures ``files``.

        ``labels``: those that a checkpoint stores (see ``TaskData.labels``), or ``class_names`` alone.

        Raises:
            DataError: some pictures cannot be read; all of them are named.
        """
        ...

    def live(self, spec: Any, labels: Mapping[str, Any]) -> "LivePictures | None":
        """Return how pictures in memory are predicted on; None: the task has no way to.

        ``labels``: as for ``pictures``.
        """
        ...


@runtime_checkable
class Loader(Protocol):
    """The micro batches of this rank, in the order of the job. Resuming in mid-epoch takes no extra time."""

    updates_per_epoch: int

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """Yield ``accumulate`` micro batches for each update from ``start`` to the end of the epoch.

        Each holds ``epoch`` (int64, shape (1,)), for models whose training changes over the epochs. In training it also
        holds ``random_key`` (int32, one for each sample), from which ``nn.Dropout`` makes its random bits: see
        ``core.noise``.
        """
        ...

    def close(self) -> None:
        """End worker processes and release shared memory. It may be called twice."""
        ...


# ------------------------------------------------------------------------------------------------ what starts the ranks
class Launcher(Protocol):
    """A plugin that turns a job into the commands that start its ranks. It runs nothing itself.

    ``mtrain plan`` prints the commands, ``mtrain train`` runs them. It is the target of one ``mtrain.launchers`` entry
    point, constructed as ``Launcher(options)``.
    """

    Options: ClassVar[type[BaseModel]]
    provides: frozenset[str] = frozenset()
    """The kinds of rendezvous that it provides: see ``Backend.rendezvous``."""
    automatic: ClassVar[bool] = True
    """False: of several launchers that provide the rendezvous of a backend, this one is chosen last."""
    agent: ClassVar[bool] = True
    """True: its command is a process that starts the ranks as its children. False: its command is itself the rank."""
    takes_names: ClassVar[bool] = True
    """False: on several hosts ``plan`` receives an address of each host in place of a name, the same in every command,
    as soon as the leader of the job knows it."""

    @abstractmethod
    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return the command of each host.

        ``argv`` is the command line of one rank without the interpreter (``-m mtrain.rank.worker ...``).
        """
        ...

    @abstractmethod
    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return (rank, exit status; negative: signal) of each rank that failed.

        They are read from the output ``log`` and the exit status ``status`` of the launcher's command.
        """
        ...


def _ignored(text: str) -> None:
    """Do nothing: a plan shows no notes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedJob:
    """The facts about a job from which a cluster brings it to its hosts."""

    hosts: Sequence[str]
    """Addresses of the hosts, as the spec lists them; the first has rank 0."""
    agent: Sequence[str]
    """The command line that starts an agent on a host; it talks to its leader over its standard input and output."""
    line: Sequence[str] = ()
    """The mtrain command that was typed here, word by word."""
    cluster: str = ""
    """The name under which the spec chooses the cluster."""
    failure_timeout_s: int = 60
    """Seconds of silence that end a job, and within which every host must have joined."""
    note: Callable[[str], None] = field(default=_ignored, compare=False)
    """Shows the user a line; in a plan it does nothing."""


class Cluster(Protocol):
    """A plugin that brings a job to several hosts: over ssh, through a scheduler, or by printing what people type.

    It is the target of one ``mtrain.clusters`` entry point, constructed as ``Cluster(options)``. It works with any
    ``Launcher``, which starts the ranks of each host.
    """

    Options: ClassVar[type[BaseModel]]
    """The keys of ``cluster.options``."""
    starts: ClassVar[bool] = True
    """True: the mtrain command that the user types leads the job and connects to the hosts through ``gathering``.
    False: it prints ``command`` for each host and ends."""
    assigns: ClassVar[frozenset[str]] = frozenset()
    """Environment variables by which it assigns devices on each host; those of the leader are not sent there."""
    submits: ClassVar[str] = ""
    """For a cluster without a queue here: the command that submits an mtrain command to its scheduler."""

    @property
    def python(self) -> str | None:
        """Return the path of the hosts' interpreter that has mtrain; None: the path of the one that runs mtrain here."""
        return None

    def places(self, count: int) -> Sequence[str]:
        """Return names for ``count`` hosts that the cluster itself chooses when the job starts.

        A job that names no host then gets ``cluster.nodes`` such hosts. Its plan shows these names; the members of the
        gathering bring the addresses. Empty: the user, or an allocation, names the hosts.
        """
        return ()

    @abstractmethod
    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the command that brings the job to host number ``node``; ``mtrain plan`` prints it.

        With ``starts`` it is run here, reaches the host and runs ``job.agent`` there. Otherwise it is the line to type
        on the host.

        Raises:
            UsageError: the host cannot be reached in this way.
        """
        ...

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> Any:
        """Return a ``mtrain.cluster.hosts.Gathering``, through which the leader connects to the agents of the hosts.

        ``mtrain.cluster.agent_processes.AgentProcesses`` runs ``command`` for each host and talks to the agent over the
        command's standard input and output. A cluster whose agents are already there, or whose scheduler starts them,
        returns its own gathering. It is called with ``starts`` only; import ``mtrain.cluster`` in here, because a plan
        needs nothing of it.

        ``environ``: environment of the processes to start.
        """
        return None

    def queue(self) -> "Queue | None":
        """Return the queue to which ``mtrain submit`` gives jobs; None: this cluster has none."""
        return None
