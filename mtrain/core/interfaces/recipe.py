"""The recipe: every setting that affects gradients or weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.core.interfaces.tensors import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantise:
    """How layers learn to compute with 8 bits; see ``core.network.quantising``."""

    start: int = 0
    """The first update, from 0, that observes the ranges of inputs; the next ones round weights and inputs."""
    freeze: int | None = None
    """The ranges stay as they are from this update on; None: they move to the end."""
    exclude: Sequence[str] = ()
    """Regexes of names of layers that are not rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """Zeros and an L1 penalty while training; see ``core.update.masking``. ``Rates.sparsity`` has the schedule."""

    sparsity: float = 0.0
    """Share of each pruned array that is 0 at the end; 0: there are no masks."""
    match: str = ""
    """Regex searched in the names of the parameters with two or more axes; '' prunes all of them."""
    norm_l1: float = 0.0
    """Weight of the L1 penalty on the scales of BatchNorms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How ranks are laid out: ``((stage * replicate + replica) * shard + part) * tensor + place`` has these four coordinates.

    Stages exchange least, so neighbours in a pipeline may be on different hosts, and those in a tensor group are not.
    """

    replicate: int
    """Groups of ranks that each hold the whole model among them."""
    shard: int
    """Ranks among which a group splits every array."""
    tensor: int
    """Ranks that compute the same samples, each a part of every layer."""
    sequence: bool = False
    """Each rank of a tensor group keeps a part of every text between the layers that the group shares."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """How a tensor group shares layers, by patterns of their names; empty: the model's own plan."""
    pipeline: int = 1
    """Stages, which each hold a part of the layers and compute the same samples one after the other."""

    @property
    def data_size(self) -> int:
        """Number of data ranks: tensor groups, which each compute samples of their own."""
        return self.replicate * self.shard

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data_size * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return the number of the tensor group of ``rank`` within its stage."""
        return rank // self.tensor % self.data_size

    @property
    def readers(self) -> Sequence[int]:
        """The ranks that together have the samples of an update once, in the order of their data ranks."""
        return range(0, self.data_size * self.tensor, self.tensor)

    def stage(self, rank: int) -> int:
        """Return the stage of ``rank``."""
        return rank // (self.data_size * self.tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Every setting that affects gradients or weights. It is fixed before the model is built."""

    rule: Literal["sgd", "adam", "adamw", "lion", "rmsprop", "lamb", "muon"]
    groups: Sequence[tuple[str, Mapping[str, float]]]
    """Parameter groups as (regex searched in the parameter name, options); the first group that matches a name takes
    it.

    The options are weight_decay, momentum, nesterov (0/1), beta1, beta2, eps. Groups are chosen by name and not by
    shape, because a ZeRO-3 shard does not have its parameter's shape.
    """
    adamw: Sequence[str] = ()
    """Rule muon: regexes of names of the matrices that AdamW trains; arrays with another number of axes always are."""
    frozen: Sequence[str] = ()
    """Regexes; parameters whose name matches one are not trained. A BatchNorm with a frozen weight normalises with its
    running statistics."""
    micro_batch: int
    """Samples per rank per forward pass."""
    accumulate: int = 1
    """Forward passes of each rank per update."""
    shards: int | None = None
    """Equal parts of each micro batch of the job, which the ranks share out: see ``core.samples.sampler.Shares``. None: one per
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
    """Formula by which the decay rises: see ``core.update.recipe.ema_shares``."""
    sync_batchnorm: bool = False
    quantise: Quantise | None = None
    """None: no layer is rounded."""
    prune: Pruning | None = None
    """None: no weight is set to 0 and no penalty is applied."""
    recompute: Sequence[str] = ()
    """Regexes of names of submodules whose inner results are computed again in the backward pass; see
    ``core.network.recomputing``. Of submodules inside each other only the outermost is."""
    channels_last: bool = False
    kernels: Literal["auto", "framework"] = "auto"
    """``auto``: mtrain's own kernels where they can be used; ``framework``: the framework's alone."""
    compile: bool = False
    compile_blocks: Sequence[str] = ()
    """Regexes of names of submodules that are compiled each by itself; none: the model is compiled whole."""
    own_model: bool = False
    """The model is a user's native module and not one built from ``core.nn``. It keeps its layers as
    they are, and may return anything and leave out parameters in some updates."""
    own_order: bool = False
    """A script orders forward and backward passes itself, perhaps of several models. A backward pass then adds to the
    gradients of this model alone, which are exchanged after it."""
    named: bool = False
    """The model is one of several. They share the framework's random generators: each is built in the stream of the one before,
    and seeds nothing after an update; so it is with ``own_order``."""
    trained: bool = True
    """False: no update changes the model, which is a teacher or a target network; its optimizer only keeps its state."""
    native_optimizer: Callable[[Any], Any] | None = None
    """Makes an optimizer of the framework for the model, in the place of ``rule``. A backend that splits arrays refuses one
    whose rule is not elementwise."""
    seed: int = 0
    mesh: Mesh | None = None
    """How ranks are laid out; None: as the backend does it, and each rank computes samples of its own."""

    def data_size(self, size: int) -> int:
        """Return among how many the samples are divided, where the job has ``size`` ranks."""
        return size if self.mesh is None else self.mesh.data_size

    def data_rank(self, rank: int) -> int:
        """Return the place of ``rank`` among those: ranks of one tensor group, and its stages, have the same samples."""
        return rank if self.mesh is None else self.mesh.data_rank(rank)
