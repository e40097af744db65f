"""The seams of the house: what a backend, a launcher, a model and a data set promise.

Read it top to bottom: values that travel (Recipe, State, Progress, Command), then what a backend supplies
(Collective, Optimizer, Backend), then what a task supplies (Model, Dataset, Evaluator, and TaskKind, which ties them to a
job), then who starts ranks (Launcher). Nothing here names a backend, a framework or a kind of task.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from pydantic import BaseModel

T = TypeVar("T")
Tensor: TypeAlias = Any
"""A tensor of the bound framework."""
Module: TypeAlias = Any
"""A native module of the bound framework: ``torch.nn.Module`` or ``paddle.nn.Layer``."""
if TYPE_CHECKING:  # numpy takes 0.1 s to import, and `mtrain plan` needs these names only
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = Any
HostBatch: TypeAlias = Mapping[str, Array]
"""One micro batch as numpy arrays, as a loader yields it."""
Batch: TypeAlias = Mapping[str, Tensor]
"""The same micro batch as tensors on the device, as a model receives it."""
Precision: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]


# ------------------------------------------------------------------------------------------------ values that travel
@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that touches gradients or weights, fixed before the model exists."""

    rule: Literal["sgd", "adam", "adamw"]
    groups: Sequence[tuple[str, Mapping[str, float]]]
    """(regex searched in the parameter name, options), the first match wins; options: weight_decay, momentum, nesterov (0/1),
    beta1, beta2, eps. By name, not by shape: ZeRO-3 shards have no shape."""
    frozen: Sequence[str] = ()
    """Regexes of parameter names that are not trained; a BatchNorm whose weight is frozen uses its running statistics."""
    micro_batch: int
    """Samples per rank per forward pass."""
    accumulate: int = 1
    """Micro batches per update."""
    precision: Precision = "fp32"
    """``fp64`` is for proofs of equality."""
    clip_norm: float = float("inf")
    """Largest global L2 norm of the gradient; inf: no limit."""
    ema_decay: float = 0.0
    """Per update; 0: no average."""
    ema_ramp: float = 2000.0
    """In updates: after update k the decay is ``ema_decay * (1 - exp(-k / ema_ramp))``; 0: no ramp."""
    ema_rule: Literal["ramp", "threshold"] = "ramp"
    """How the decay rises: see ``core.recipe.ema_shares``."""
    sync_batchnorm: bool = False
    channels_last: bool = False
    compile: bool = False
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class State:
    """Weights and optimizer as whole numpy arrays under neutral names, the same whichever backend wrote them."""

    weights: dict[str, Array] = field(default_factory=dict)
    """Parameters and buffers (rank 0's buffers)."""
    ema: dict[str, Array] = field(default_factory=dict)
    """Averaged parameters and float buffers; empty without EMA."""
    moments: dict[str, Array] = field(default_factory=dict)
    """``<moment>/<parameter name>``: ``momentum/...`` for sgd, ``mean/...`` and ``square/...`` for adam(w)."""
    counters: dict[str, float] = field(default_factory=dict)
    """``updates`` (optimizer steps taken), ``skipped``, ``skipped_in_a_row``, ``loss_scale``, ``loss_scale_age``."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """Where a job stands. Update ``update`` is the next one to run; it is number ``position`` of epoch ``epoch``."""

    update: int = 0
    epoch: int = 0
    position: int = 0
    best: float = float("-inf")
    best_epoch: int = -1
    epochs_without_gain: int = 0
    scored_update: int = -1
    """The update behind which the job was evaluated last."""
    samples: int = 0
    skipped: int = 0
    """Updates whose gradient was not finite."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a schedule says for one update."""

    rates: Sequence[float]
    """Learning rate of each group of the recipe, in its order."""
    momentum: float | None = None
    """Overrides the groups' momentum (sgd) or beta1 (adam); None: as the groups say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One process to start on one host: data that is printed by ``mtrain plan`` and run by ``mtrain train``."""

    host: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables set for the process, over the cleaned environment of the caller."""
    stdin: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine of a job."""

    address: str
    slots: int = 1
    """Ranks on it."""


# -------------------------------------------------------------------------------------------- what a backend supplies
class Collective(Protocol):
    """The ranks of one job. Every rank makes the same calls in the same order."""

    rank: int
    local_rank: int
    size: int

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """A new tensor: ``x`` of all ranks reduced element by element, equal on every rank. Carries no gradient.

        A numpy array is reduced on the host, without waiting for the device, and comes back as one.
        """
        ...

    def all_gather(self, value: T) -> list[T]:
        """Any picklable value of every rank, ordered by rank."""
        ...


class Optimizer(Protocol):
    """One rule bound to one model. Scaling, exchange between ranks, clipping and EMA are inside."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each group of the recipe, in model order."""
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro batch; ``last``: gradients are exchanged in its backward."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, the mean over this micro batch, divided by ``accumulate``."""
        ...

    def step(self, rates: Rates) -> float:
        """One update: average over ranks, clip, apply, zero, EMA. Returns the gradient norm before clipping.

        A norm that is not finite leaves weights, moments and EMA untouched and is returned as it is.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """The model holds the EMA weights while inside, on every rank, buffers of rank 0 included."""
        ...


class Backend(Protocol):
    """Training on many ranks: the target of one ``mtrain.backends`` entry point.

    Constructed as ``Backend(options)``. Its module imports no framework before ``nn``, ``ops`` or ``with`` ask for one.
    """

    Options: ClassVar[type[BaseModel]]
    framework: str
    """"torch", "paddle": whose ``nn`` and ``ops`` it brings."""
    rendezvous: str
    """What its starter must provide: "none", "torch", "horovod", "paddle"."""

    @property
    def nn(self) -> ModuleType:
        """The framework's neutral layers (``core/nn.pyi``)."""
        ...

    @property
    def ops(self) -> ModuleType:
        """The framework's neutral functions (``core/ops.pyi``)."""
        ...

    @property
    def collective(self) -> Collective:
        """Valid inside ``with backend:``."""
        ...

    @property
    def device(self) -> str:
        """What this rank computes on, for people: ``cpu``, or ``cuda:1 (NVIDIA H100)``. Valid inside ``with backend:``."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """Build the model, place it on this rank's device, bind the recipe. Every rank calls it.

        A backend that cannot follow every recipe has a method ``check(recipe, *, size, on_cpu)`` besides, which raises
        ``SpecError`` without importing its framework: a plan calls it, so that the job is refused before a rank starts.
        ``size``: ranks; ``on_cpu``: whether they certainly compute on the CPU.
        """
        ...

    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        """Numpy micro batches as device tensors, prefetched where the device allows."""
        ...

    def infer(self, model: Module, batch: Batch) -> dict[str, Array]:
        """What the model returns in evaluation mode, on the host: no gradient, the recipe's precision, no exchange.

        The caller sets the mode. Half-precision results become float32.
        """
        ...

    def state(self, model: Module, optimizer: Optimizer) -> State:
        """Whole arrays under neutral names, copied; collective; every rank may keep or drop what it returns."""
        ...

    def restore(self, model: Module, optimizer: Optimizer, state: State) -> None:
        """Put ``state`` back, on every rank. Empty parts of it are left as they are, except that ``ema``, when empty,
        restarts from the weights."""
        ...

    def measure(self) -> Mapping[str, float]:
        """``memory_bytes``: peak of this rank on its device (resident set on CPU).

        A backend that can tell how long its ranks wait for each other has a method ``time_waits()`` besides, which is called
        before ``prepare`` where a comparison asks for it. From then on ``communication_s`` is added, if it can be told on this
        device: seconds so far in which this rank has done nothing but wait for other ranks.
        """
        ...


# ------------------------------------------------------------------------------------------------- what a task supplies
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a model must know of the data and the job before it is built."""

    kind: str
    """Of the task: a data set and a model of one job must be of the same kind."""
    class_names: Sequence[str]
    image_size: int
    """Side of the square input, in pixels."""
    global_batch: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """What a model adds in ``prepare_task``: figures of the data that its network is built with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """How published files of a model's weights differ from its state here; whose framework spells names how is known without it.

    Patterns are regexes searched in neutral names. A plugin class may have one as ``published``; without it: no difference.
    """

    left_out: Sequence[str] = ()
    """Entries that no published file has."""
    float32: Sequence[str] = ()
    """Whole names of entries of whole numbers that are published as float32."""
    per_class: Sequence[str] = ()
    """Entries whose shape depends on the number of classes."""
    of_data: Sequence[str] = ()
    """Entries that come from the data of a job: training keeps its own, evaluation takes the file's."""


class Model(Protocol):
    """The target of one ``mtrain.models`` entry point, constructed as ``Model(options)``; it describes, it is no module.

    Its module imports no network at import time: ``core.nn`` is bound only inside a rank. A class attribute ``published``
    (``Published``) may say how files of its weights by others differ.
    """

    Options: ClassVar[type[BaseModel]]
    kind: ClassVar[str]

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Add to the task what depends on the data; pure numpy, equal on every rank."""
        ...

    def build(self, task: Task, collective: Collective) -> Module:
        """A native module on the bound framework. In training mode ``module(batch)`` returns a dict of scalar losses of which
        ``"total"`` alone carries a gradient; in evaluation mode it returns a dict of tensors with the batch as first axis.

        ``collective`` is for figures that a loss needs of all ranks: in training mode every rank calls the module as often.
        """
        ...

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Start values of every weight and buffer, keyed by (seed, name): equal on every framework."""
        ...

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Any]:
        """Output of evaluation mode, as numpy, turned into one value per sample for the evaluator (picklable)."""
        ...


class Evaluator(Protocol):
    """Collects predictions of a whole evaluation set and turns them into figures."""

    figures: ClassVar[Sequence[str]]
    """Names of the figures of ``result``; those of one class are named ``<figure>/<class>``."""
    headline: ClassVar[Sequence[str]]
    """The few of them that get a column or a curve, the most telling first."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Take one micro batch; ``batch["index"]`` says which samples."""
        ...

    def partial(self) -> Any:
        """What this rank has collected: picklable."""
        ...

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Figures from the partials of all ranks; a sample seen twice counts once. ``"score"`` is the one to maximise."""
        ...

    def remarks(self) -> list[str]:
        """Sentences about the last result that no single figure says; may be empty."""
        ...


class Source(Protocol):
    """A sequence of samples as a pure function: ``sample(epoch, index, update=...)`` never depends on rank, size or worker."""

    def __len__(self) -> int: ...

    def sample(self, epoch: int, index: int, *, update: int = 0) -> Any:
        """One sample; augmentation is keyed by (seed, epoch, index), what all samples of an update share (their size) by
        (seed, epoch, update)."""
        ...

    def collate(self, samples: Sequence[Any]) -> dict[str, Array]:
        """A micro batch; holds ``index`` (int64, which samples)."""
        ...


class Dataset(Protocol):
    """The target of one ``mtrain.datasets`` entry point, constructed as ``Dataset(options)``: reads one format."""

    Options: ClassVar[type[BaseModel]]
    kind: ClassVar[str]
    """Of the task that it serves."""

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Literal["train", "val", "test", "all"],
    ) -> Any:
        """One split, in the form of its kind, with a length and ``class_names``; the arguments are ``data.root``,
        ``data.<split>``, ``data.images`` and ``data.names`` of the spec. ``all``: every picture of ``data.train``, or that
        there is; asked for with ``data.split``.

        Raises:
            DataError: the files are missing, unreadable or disagree with the spec.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Counts for a person to read."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str] | None]
    """None: a line between the rows before and behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A sentence for a person to read."""

    text: str
    good: bool | None = None
    """False: something to look at; None: neither good nor bad."""


class JobData(Protocol):
    """What a job asks of its pictures, whatever is done with them."""

    def task(self) -> Task:
        """What a model must know before it is built."""
        ...

    def sources(self) -> Mapping[str, Any]:
        """``train`` (augmented; left out where nothing is trained) and ``val``, as the loader takes them."""
        ...

    def length(self, split: str) -> int:
        """Samples of ``train`` or ``val``."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """What ``Model.prepare_task`` is given."""
        ...

    def evaluator(self) -> Evaluator:
        """A fresh one over ``val``."""
        ...


class TaskData(JobData, Protocol):
    """The data side of a job that trains or evaluates: a data set as one kind of task sees it."""

    def verify(self) -> str:
        """Look at everything that can be unreadable; returns in words what was looked at.

        Raises:
            DataError: some cannot be used; the first ones are named.
        """
        ...

    def labels(self) -> dict[str, Any]:
        """What a checkpoint remembers of the classes, for ``TaskKind.pictures``; plain values."""
        ...

    def report(self) -> list[str]:
        """One sentence for each kind of thing that is wrong with the splits."""
        ...

    def describe(self) -> Sequence[Table | Remark]:
        """Both splits in tables and sentences, for ``mtrain data check``."""
        ...

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """(name, what is seen, uint8 (H, W, 3) RGB): up to ``limit`` samples of each split, and as the network is given them."""
        ...

    def draw(self, found: Any, path: Path) -> None:
        """Truth beside predictions for some samples of ``found``, an evaluator's ``partial``."""
        ...


class PictureData(JobData, Protocol):
    """The data side of prediction: pictures without labels, as ``val``."""

    def write(
        self, found: Any, out: Path, *, confidence: float, draw: bool, names: Mapping[Path, str] | None = None
    ) -> None:
        """What an evaluator's ``partial`` holds, as ``predictions.json`` (a list with one entry per prediction of at least
        ``confidence``, with ``file_name``, ``class`` and ``score``), and with ``draw`` each picture with what was found.

        ``names``: what each file is called in the list; its path where it is not named.
        """
        ...


class TaskKind(Protocol):
    """A kind of task, the value of its name in ``assembly.TASKS``: constructed as ``kind(spec, opened, training=)``."""

    def __call__(self, spec: Any, data: Any, *, training: bool = True) -> TaskData:
        """``data``: what ``mtrain.tasks.datasets.open_data`` returns; without ``training`` only the evaluation split is read."""
        ...

    def pictures(self, spec: Any, files: Sequence[Path], labels: Mapping[str, Any]) -> PictureData:
        """Pictures to predict on. ``labels``: a checkpoint's, see ``TaskData.labels``, or ``class_names`` alone.

        Raises:
            DataError: some cannot be read; all of them are named.
        """
        ...


@runtime_checkable
class Loader(Protocol):
    """Micro batches of this rank, in the order of the job. Resuming in mid-epoch costs nothing."""

    updates_per_epoch: int

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """``accumulate`` micro batches for each update from ``start`` to the end of the epoch; each holds ``epoch`` (int64,
        (1,)), for models whose training changes on the way."""
        ...

    def close(self) -> None:
        """End worker processes and give shared memory back. Can be called twice."""
        ...


# --------------------------------------------------------------------------------------------------- who starts the ranks
class Launcher(Protocol):
    """A job as commands. Pure: ``mtrain plan`` prints them, ``mtrain train`` starts them."""

    Options: ClassVar[type[BaseModel]]
    provides: frozenset[str]
    """The rendezvous it can give: see ``Backend.rendezvous``. A launcher with an attribute ``automatic = False`` is taken behind
    all others that give it."""

    agent: ClassVar[bool]
    """Whether its command is a process that starts the ranks as its children; False: the command is the rank."""

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """``argv`` is what one rank runs, without the interpreter (``-m mtrain.rank.worker ...``)."""
        ...

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """(rank, exit status; negative: signal) of ranks that failed, from its command's output and exit status."""
        ...


class Carrier(Protocol):
    """How the commands of a job get to several hosts; the other plugins of kind ``launchers``. It wraps whatever starts the ranks
    of one host."""

    Options: ClassVar[type[BaseModel]]
    carries: ClassVar[bool]
    """True. What starts ranks has no such attribute."""
    starts: ClassVar[bool]
    """Whether it brings the commands there; False: people do, with the lines that ``bring`` gives."""

    def bring(self, host: str, node: int) -> Sequence[str]:
        """The command that, run here, gets to ``host``; where ``starts`` is false, what is to be typed there."""
        ...
