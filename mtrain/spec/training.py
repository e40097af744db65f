"""The sections of a spec on training itself: length, batch size, precision, optimizer and learning rate."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mtrain.spec.section import Fraction, Pattern, Positive, Section


class EmaSpec(Section):
    """Exponential moving average of the weights, which is evaluated and exported in their place."""

    decay: float = Field(default=0.9999, ge=0, lt=1, description="per update; 0: no average")
    ramp: float = Field(default=2000.0, ge=0, description="the decay is decay * (1 - exp(-update / ramp))")
    rule: Literal["ramp", "threshold"] = Field(
        default="ramp", description="ramp: YOLOv5's; threshold: PaddleDetection's"
    )


class QuantiseSpec(Section):
    """Training with weights and inputs of convolutions and linear layers rounded to 8 bits, for `mtrain quantise`."""

    start: int = Field(
        default=0, ge=0, description="update from which ranges of inputs are observed; the next ones round"
    )
    freeze: int | None = Field(default=None, ge=1, description="update from which the ranges stay")
    exclude: list[Pattern] = Field(default_factory=list, description="regexes of names of layers that are not rounded")

    @model_validator(mode="after")
    def _ranges_are_observed(self) -> Self:
        if self.freeze is not None and self.freeze <= self.start:
            raise ValueError(
                f"freeze ({self.freeze}) is not after start ({self.start}), so no range would be observed; give a later update"
            )
        return self


class DistilSpec(Section):
    """Imitation of a trained model, the teacher, while training."""

    teacher: str | None = Field(
        default=None, description="required: a run folder (its best checkpoint), a checkpoint, or a file of weights"
    )
    model: str | None = Field(default=None, description="the teacher's model, if `teacher` is a file of weights")
    options: dict[str, Any] = Field(default_factory=dict, description="options of that `model`")
    labels: float = Field(default=1.0, ge=0, description="factor of the model's own loss")
    outputs: float = Field(default=1.0, ge=0, description="factor of the difference of the outputs")
    features: float = Field(
        default=0.0, ge=0, description="factor of the difference of the attention maps (not for vision transformers)"
    )
    temperature: float = Field(default=4.0, gt=0, description="divides class logits before they are compared")

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if self.outputs == 0 and self.features == 0:
            raise ValueError(
                "outputs and features are both 0, so nothing is imitated; give one of them, or set distil: null"
            )
        if self.options and self.model is None:
            raise ValueError(
                "options are given without model; name the teacher's model, or leave out both for a run's own"
            )
        return self


class PruneSpec(Section):
    """Pruning while training: weights that are set to 0 and stay so, and an L1 penalty on the scales of BatchNorms.

    The share of zeros rises from 0 at `start` to `sparsity` at `end` as `sparsity * (1 - (1 - t) ** 3)`, t from 0 to 1
    (Zhu and Gupta 2017, arXiv 1710.01878, equation 1). In each array the smallest weights are set to 0.
    """

    sparsity: float = Field(
        default=0.0, ge=0, lt=1, description="share of each pruned array that is 0 at the end; 0: no masks"
    )
    match: Pattern = Field(default="", description="regex in the names of arrays with two or more axes; '' takes all")
    start: Fraction = Field(default=0.0, description="where in the job the share of zeros begins to rise")
    end: Fraction = Field(default=0.75, description="where in the job it reaches `sparsity`")
    every_updates: Positive = Field(default=10, description="updates from one choice of zeros to the next")
    norm_l1: float = Field(
        default=0.0, ge=0, description="L1 penalty on the scales of BatchNorms, for `mtrain prune --by bn`"
    )

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"start ({self.start}) and end ({self.end}) are given; expected start below end")
        return self


class TrainSpec(Section):
    """Length, batch size, precision and further settings of training."""

    epochs: Positive | None = Field(default=None, description="passes over the training split; give this or `updates`")
    updates: Positive | None = Field(default=None, description="optimizer steps in all; give this or `epochs`")
    batch_size: Positive = Field(default=16, description="GLOBAL batch: samples per update over all ranks")
    reference_batch_size: Positive = Field(
        default=64, description="batch for which learning rate and weight decay are given"
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt", "yolov5"] = Field(
        default="none",
        description="linear, sqrt: learning rate x (batch/reference) or its root; yolov5: weight decay x batch/reference",
    )
    accumulate: Positive | Literal["auto"] = Field(
        default="auto", description="micro batches per update; auto: as few as max_micro_batch allows"
    )
    max_micro_batch: Positive | Literal["auto"] | None = Field(
        default=None,
        description="largest micro batch of one rank; null: no limit; auto: the largest that fits into memory, "
        "measured before the run (docs/memory.md)",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = Field(
        default="fp32",
        description="of the forward and backward pass; auto: bf16 on CUDA devices of compute capability 8 or newer, "
        "else fp32",
    )
    clip_norm: float | None = Field(
        default=10.0, gt=0, description="largest global L2 norm of the gradient; null: no limit"
    )
    ema: EmaSpec | None = Field(default=EmaSpec(), description="null: no average")
    distil: DistilSpec | None = Field(
        default=None, description="imitate a trained model: `{teacher: runs/big}`; null: learn from labels alone"
    )
    sync_batchnorm: bool = Field(default=False, description="BatchNorm statistics over all ranks")
    quantise: QuantiseSpec | None = Field(
        default=None, description="learn weights and ranges for 8-bit integers; null: no rounding"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="of weights, order and augmentation")
    channels_last: bool | Literal["auto"] = Field(
        default="auto", description="memory layout of torch's convolutions; auto: the fastest known"
    )
    kernels: Literal["auto", "framework"] = Field(
        default="auto", description="auto: mtrain's own kernels for the CPU, if there is a C compiler"
    )
    compile: bool | Literal["blocks"] = Field(
        default=False,
        description="compile the model; blocks: each of the blocks that the model names, so that deep models start soon",
    )
    freeze: list[Pattern] = Field(default_factory=list, description="regexes of parameter names that are not trained")
    prune: PruneSpec | None = Field(
        default=None, description="zeros and an L1 penalty while training, see docs/pruning.md; null: none"
    )
    recompute: bool | list[Pattern] = Field(
        default=False,
        description="compute inner results again in the backward pass, for less memory and the same bits; true: of "
        "the blocks that the model names; or regexes of submodules (docs/memory.md)",
    )
    patience: Positive | None = Field(
        default=None, description="stop after this many evaluations without a better score"
    )
    max_nonfinite: Positive = Field(default=20, description="stop after this many non-finite updates in a row")

    @model_validator(mode="after")
    def _length_is_given_once(self) -> Self:
        if self.epochs is not None and self.updates is not None:
            raise ValueError(both_lengths(self.epochs, self.updates))
        return self

    @model_validator(mode="after")
    def _one_pass_through_blocks(self) -> Self:
        if self.recompute and self.compile:
            raise ValueError(
                "compile and recompute are both given, but a compiled model chooses itself what it keeps; set one to false"
            )
        return self


def both_lengths(epochs: Any, updates: Any) -> str:
    """Return the error message for a job whose length is given both in epochs and in updates."""
    return f"epochs ({epochs}) and updates ({updates}) are both given; keep one and set the other to null"


class GroupSpec(Section):
    """Parameters that share options. A parameter belongs to the first group whose regex is found in its name."""

    match: Pattern = Field(description="regex in the parameter name; '' takes all")
    learning_rate_factor: float = Field(default=1.0, ge=0, description="times the learning rate")
    weight_decay: float | None = Field(default=None, ge=0, description="null: the optimizer's")
    warmup_from: float | None = Field(
        default=None, ge=0, description="learning rate at update 0; null: schedule.warmup.learning_rate_from"
    )


class OptimizerSpec(Section):
    """The rule that turns gradients into weights."""

    rule: Literal["sgd", "adam", "adamw", "lion", "rmsprop", "lamb", "muon"] = Field(
        default="sgd", description="lamb and muon need a backend that keeps arrays whole (docs/backends.md)"
    )
    learning_rate: float = Field(default=0.01, gt=0, description="learning rate after warm-up, before the schedule")
    momentum: float = Field(default=0.937, ge=0, lt=1, description="sgd, rmsprop and muon: momentum; others: beta1")
    nesterov: bool = Field(default=True, description="of sgd and muon")
    weight_decay: float = Field(default=0.0005, ge=0, description="of the groups that do not give their own")
    beta2: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="decay of the squared gradient; lion: of the mean. Usual: 0.999; 0.99 for lion and rmsprop",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="muon: beta1 of the arrays that adamw trains")
    adamw: list[Pattern] = Field(
        default_factory=lambda: ["(?<![a-z])emb", "wte|wpe", "(?<![a-z])head(?![a-z])", "classifier"],
        description="muon: regexes of matrices that adamw trains, embeddings and heads; arrays with another number of"
        " axes always are",
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the squared gradient; lamb: usually 1e-6")
    groups: list[GroupSpec] = Field(
        default_factory=lambda: [
            GroupSpec(match=r"\.bias$", weight_decay=0.0),
            GroupSpec(match=r"\.bn\d*\.weight$", weight_decay=0.0),
            GroupSpec(match=""),
        ],
        description="by name, the first match wins",
    )


class WarmupSpec(Section):
    """Linear rise of learning rate and momentum at the start, as long as `epochs` or `updates` says, or the larger of both."""

    epochs: float | None = Field(default=3.0, ge=0, description="length in epochs, unless `updates` alone is given")
    updates: int | None = Field(default=100, ge=0, description="length in updates, unless `epochs` alone is given")
    learning_rate_from: float = Field(default=0.0, ge=0, description="learning rate at update 0")
    momentum_from: float | None = Field(
        default=None, ge=0, lt=1, description="sgd and rmsprop: momentum at update 0; null: no warm-up of it"
    )
    before_curve: bool = Field(
        default=False,
        description="true: the curve begins after the warm-up (PaddleDetection); false: both begin at update 0 (YOLOv5)",
    )

    @model_validator(mode="before")
    @classmethod
    def _what_is_given_alone_counts_alone(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # The larger length counts, so the default of the unit that is not given would lengthen a short warm-up.
        given = [name for name in ("epochs", "updates") if values.get(name) is not None]
        return values if len(given) != 1 else {"epochs": None, "updates": None, **values}


class ScheduleSpec(Section):
    """Course of the learning rate over the job, as a factor of optimizer.learning_rate."""

    name: Literal["cosine", "linear", "polynomial", "exponential", "step", "one_cycle", "constant"] = Field(
        default="linear", description="shape of the curve"
    )
    final_factor: float = Field(default=0.01, ge=0, description="factor at the end (not step, constant)")
    power: float = Field(default=0.9, gt=0, description="polynomial: the power of the remaining share of the job")
    milestones: list[float] = Field(
        default_factory=list, description="step: epochs after which the learning rate is multiplied by gamma"
    )
    gamma: float = Field(default=0.1, gt=0, description="step: the multiplier")
    peak: Fraction = Field(default=0.3, description="one_cycle: where the peak lies, as a share of the job")
    per: Literal["epoch", "update"] = Field(default="epoch", description="the factor changes at each epoch or update")
    horizon_epochs: float | None = Field(
        default=None, gt=0, description="epochs over which the curve is drawn; null: the job's length"
    )
    warmup: WarmupSpec | None = Field(
        default=WarmupSpec(momentum_from=0.8),
        description="null: no warm-up; where the section is not given, YOLOv5's, with momentum_from 0.8",
    )

    @model_validator(mode="after")
    def _curve_is_complete(self) -> Self:
        if self.name == "step" and not self.milestones:
            raise ValueError(
                "name is 'step' and milestones is empty; give the epochs of the steps, e.g. milestones: [60, 80]"
            )
        if self.name == "exponential" and self.final_factor == 0:
            raise ValueError(
                "name is 'exponential' and final_factor is 0, which no power reaches; give one > 0, e.g. 0.01"
            )
        return self
