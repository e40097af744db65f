"""The schema of a spec: the keys that the YAML file may contain, with their defaults, units and ranges.

Each section of the file has a class. Every key has a description, from which ``mtrain config schema`` makes the
reference. Nothing here reads a file (``config.py`` does) or imports a framework.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mtrain.errors import UsageError
from mtrain.spec.hostnames import checked_host, checked_user


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"given {pattern!r}, expected a regular expression: {error}") from None
    return pattern


def _is_host(text: str) -> str:
    try:
        return checked_host(text)
    except UsageError as error:
        raise ValueError(f"given {error}") from None


def _is_user(text: str) -> str:
    try:
        return checked_user(text)
    except UsageError as error:
        raise ValueError(f"given {error}") from None


def _rises(span: list[float]) -> list[float]:
    if len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"given {span}, expected [smallest, largest]")
    return span


def _each_once(devices: list[int]) -> list[int]:
    if len(set(devices)) < len(devices):
        raise ValueError(f"given {devices}, expected device numbers, each once: two ranks do not share a device")
    return devices


def _fits_strides(side: int) -> int:
    if side % STRIDE:
        raise ValueError(f"given {side}, expected a multiple of {STRIDE}; use {max(round(side / STRIDE), 1) * STRIDE}")
    return side


STRIDE = 32
"""Pixels of the network input per cell of the coarsest feature map; the input's side must be a multiple of it."""
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Side = Annotated[int, Field(gt=0, le=16384)]
"""Side of a square picture, in pixels."""
PerHost = Annotated[int, Field(gt=0, le=1024)]
"""Number of processes or threads on a host. The limit keeps a typing error from starting a million of them."""
Port = Annotated[int, Field(gt=0, lt=65536)]
DeviceNumbers = Annotated[list[Count], AfterValidator(_each_once)]
HostName = Annotated[str, AfterValidator(_is_host)]
Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, searched in parameter names."""
Span = Annotated[list[float], AfterValidator(_rises)]
"""Range [smallest, largest] of a random value."""
Factors = Annotated[list[Annotated[float, Field(ge=0)]], AfterValidator(_rises)]
"""Range [smallest, largest] of a random factor, not negative."""


class Section(BaseModel):
    """Base class of all sections. It refuses unknown keys, wrong types and non-finite numbers; values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class ModelSpec(Section):
    """The network, and the weights that it starts from."""

    name: str = Field(default="yolov5n", description="a plugin of kind `models`: see `mtrain plugins list`")
    weights: str | None = Field(
        default=None,
        description="file to start from (.safetensors, .pdparams, .pt, checkpoint, run); entries that fit are "
        "taken, the others are reported",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the model plugin's own options")


class DistortSpec(Section):
    """Random change of colours in four steps; each is applied with the given probability, in random order."""

    probability: Fraction = Field(default=0.5, description="of each step")
    hue: float = Field(default=180.0, ge=0, le=180, description="rotation of the chroma in YIQ, +- degrees")
    saturation: Factors = Field(default=[0.5, 1.5], description="factor of the distance to grey")
    contrast: Factors = Field(default=[0.5, 1.5], description="factor of all values")
    brightness: Span = Field(default=[0.5, 1.5], description="grey levels (of 255) added to all values")


class ExpandSpec(Section):
    """Random placement of the picture on a larger canvas."""

    probability: Fraction = Field(default=0.5, description="of an expansion")
    ratio: float = Field(default=4.0, ge=1, description="largest canvas, as a multiple of the picture's sides")
    fill: list[Annotated[float, Field(ge=0, le=255)]] = Field(
        default=[123.675, 116.28, 103.53], min_length=3, max_length=3, description="colour around it: red, green, blue"
    )


class CropSpec(Section):
    """Random crop to a window that holds the centre of at least one box (SSD: Liu et al. 2016, section 2.2)."""

    thresholds: list[Fraction] = Field(
        default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9],
        description="one is drawn: some box overlaps the window by at least this IoU",
    )
    allow_no_crop: bool = Field(default=True, description="one more choice beside the thresholds: no crop")
    scaling: Annotated[list[Fraction], AfterValidator(_rises)] = Field(
        default=[0.3, 1.0], description="square root of the window's share of the picture's area"
    )
    aspect_ratio: Factors = Field(
        default=[0.5, 2.0], description="width / height of the window over those of the picture"
    )
    num_attempts: Positive = Field(default=50, description="windows tried for a threshold before the next one is drawn")


class AugmentSpec(Section):
    """Augmentation of training pictures: YOLOv5's keys under its names, and the keys for `resize: stretch`."""

    mosaic: Fraction = Field(default=1.0, description="probability of a mosaic")
    mosaic9: Fraction = Field(
        default=0.0, description="of the mosaics, the share that uses nine pictures instead of four"
    )
    mixup: Fraction = Field(default=0.0, description="probability of mixing a mosaic with another one")
    degrees: float = Field(default=0.0, ge=0, le=180, description="rotation, +- degrees")
    translate: float = Field(default=0.1, ge=0, le=0.9, description="shift, +- fraction of the side")
    scale: float = Field(default=0.5, ge=0, lt=1, description="zoom, 1 +- this")
    shear: float = Field(default=0.0, ge=0, le=45, description="+- degrees")
    perspective: float = Field(default=0.0, ge=0, le=0.001, description="+- per pixel")
    hsv_h: Fraction = Field(default=0.015, description="hue gain, +- fraction")
    hsv_s: Fraction = Field(default=0.7, description="saturation gain, +- fraction")
    hsv_v: Fraction = Field(default=0.4, description="value gain, +- fraction")
    flip_ud: Fraction = Field(default=0.0, description="probability of an up-down flip")
    flip_lr: Fraction = Field(default=0.5, description="probability of a left-right flip")
    close_mosaic_epochs: int = Field(default=0, ge=0, description="no mosaic and no mixup in this many last epochs")
    sizes: list[Annotated[Side, AfterValidator(_fits_strides)]] | None = Field(
        default=None,
        min_length=1,
        description="sides of the network input in pixels, one drawn for each update (multi-scale training); null: "
        "image_size, or multi_scale around it",
    )
    multi_scale: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="x: each update draws its input size from the multiples of 32 between image_size * (1 - x) and "
        "image_size * (1 + x); needs `resize: letterbox`; YOLOv5's --multi-scale is 0.5; 0: off",
    )
    interpolations: list[Literal["nearest", "linear", "area", "cubic", "lanczos4"]] = Field(
        default=["linear"], min_length=1, description="with `resize: stretch`: one drawn for each update"
    )
    distort: DistortSpec | None = Field(default=None, description="with `resize: stretch`; null: none")
    expand: ExpandSpec | None = Field(default=None, description="with `resize: stretch`; null: none")
    crop: CropSpec | None = Field(default=None, description="with `resize: stretch`; null: none")


_LETTERBOX_ONLY: dict[str, Any] = dict.fromkeys(
    ("mosaic", "mosaic9", "mixup", "degrees", "translate", "scale", "shear", "perspective", "multi_scale"), 0.0
)
"""Keys of `augment` that need `resize: letterbox`, with the value that switches each one off."""
_STRETCH_ONLY: dict[str, Any] = dict.fromkeys(("distort", "expand", "crop")) | {"interpolations": ["linear"]}
"""Keys of `augment` that need `resize: stretch`, with the value that switches each one off."""


class DataSpec(Section):
    """Pictures and annotations. Relative paths are taken from `root`, and `root` from the current directory."""

    format: str = Field(default="digits", description="a plugin of kind `datasets`: see `mtrain plugins list`")
    root: str | None = Field(default=None, description="folder of the data set; null: where the plugin keeps its own")
    train: str | None = Field(
        default=None,
        description="coco: annotation JSON; voc, yolo: folder or list file; null: the format's usual place "
        "(docs/data.md)",
    )
    val: str | None = Field(default=None, description="the same for the evaluation split")
    split: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None,
        description="share of the pictures of `train` (null: of all there are) that becomes the evaluation split; it "
        "depends on names and split_seed alone",
    )
    split_seed: Count = Field(default=0, description="another one chooses other pictures for `split`")
    skip_missing: bool = Field(
        default=False, description="leave out pictures that are annotated but not there, and say how many"
    )
    images: str | None = Field(default=None, description="folder of the pictures; null: the format's usual place")
    names: list[str] | None = Field(default=None, description="class names in label order; null: as the data set says")
    options: dict[str, Any] = Field(default_factory=dict, description="the data set plugin's own options")
    image_size: Side = Field(
        default=640, description="side of the square network input, in pixels; in training see augment.sizes"
    )
    resize: Literal["letterbox", "stretch"] = Field(
        default="letterbox",
        description="letterbox: keep the picture's shape, fill up with grey; stretch: both sides to image_size",
    )
    augment: AugmentSpec = Field(default=AugmentSpec(), description="of the training split")
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        default="auto", description="loader processes per rank; 0: in the rank itself; auto: by cores"
    )
    cache: Literal["none", "ram", "disk"] = Field(default="none", description="where decoded pictures are kept")
    cache_dir: str | None = Field(default=None, description="folder of the disk cache; null: the user's cache folder")
    max_pixels: Positive = Field(
        default=120_000_000,
        description="pixels of the largest picture that is decoded: a small file can hold an enormous picture",
    )
    prefetch: Positive = Field(default=4, description="micro batches prepared ahead per rank")

    @model_validator(mode="after")
    def _evaluation_split_is_given_once(self) -> Self:
        if self.split is not None and self.val is not None:
            raise ValueError(
                f"split ({self.split}) takes the evaluation split from the training pictures, but val "
                f"({self.val}) is given too; set one of them to null"
            )
        return self

    @model_validator(mode="after")
    def _augmentation_suits_the_resize(self) -> Self:
        unsuitable, remedy = _LETTERBOX_ONLY, "set them to 0, or take resize: letterbox"
        if self.resize == "letterbox":
            unsuitable, remedy = _STRETCH_ONLY, "leave them out, or take resize: stretch"
        active = [f"augment.{name}" for name, off in unsuitable.items() if getattr(self.augment, name) != off]
        if active:
            raise ValueError(f"resize is {self.resize}, which does not go with {', '.join(active)}; {remedy}")
        if self.augment.multi_scale and self.augment.sizes is not None:
            raise ValueError("augment.sizes and augment.multi_scale both set the sides of the input; keep one of them")
        return self


class EmaSpec(Section):
    """Exponential moving average of the weights, which is evaluated and exported in their place."""

    decay: float = Field(default=0.9999, ge=0, lt=1, description="per update; 0: no average")
    ramp: float = Field(
        default=2000.0, ge=0, description="updates over which the decay rises: decay * (1 - exp(-k / ramp))"
    )
    rule: Literal["ramp", "threshold"] = Field(
        default="ramp",
        description="ramp: YOLOv5's, see `ramp`; threshold: PaddleDetection's, min(decay, (1 + k) / (10 + k)), "
        "corrected for its start",
    )


class TrainSpec(Section):
    """Length, batch size, precision and further settings of training."""

    epochs: Positive | None = Field(default=None, description="passes over the training split; give this or `updates`")
    updates: Positive | None = Field(default=None, description="optimizer steps in all; give this or `epochs`")
    batch_size: Positive = Field(default=16, description="GLOBAL batch: samples per update over all ranks")
    reference_batch_size: Positive = Field(
        default=64, description="the global batch for which rate and weight decay are given"
    )
    rate_scaling: Literal["none", "linear", "sqrt", "yolov5"] = Field(
        default="none",
        description="none: rate as written; linear, sqrt: rate x (batch/reference) or its root; "
        "yolov5: rate as written, weight decay x batch/reference",
    )
    accumulate: Positive | Literal["auto"] = Field(
        default="auto", description="micro batches per update; auto: as few as max_micro_batch allows"
    )
    max_micro_batch: Positive | None = Field(
        default=None, description="largest micro batch of one rank that `accumulate: auto` may choose; null: no limit"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32", description="of the forward and backward pass; fp64 is for proofs of equality"
    )
    clip_norm: float | None = Field(
        default=10.0, gt=0, description="largest global L2 norm of the gradient; null: no limit"
    )
    ema: EmaSpec | None = Field(default=EmaSpec(), description="null: no average")
    sync_batchnorm: bool = Field(default=False, description="BatchNorm statistics over all ranks; works on CPU too")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of weights, order and augmentation")
    channels_last: bool | Literal["auto"] = Field(
        default="auto",
        description="memory layout of torch's convolutions; false: contiguous; auto: the fastest known for the device",
    )
    compile: bool = Field(default=False, description="compile the model where the framework can")
    freeze: list[Pattern] = Field(default_factory=list, description="regexes of parameter names that are not trained")
    patience: Positive | None = Field(
        default=None, description="stop after this many evaluations without a better score"
    )
    max_nonfinite: Positive = Field(
        default=20, description="stop with an error after this many non-finite updates in a row"
    )

    @model_validator(mode="after")
    def _length_is_given_once(self) -> Self:
        if self.epochs is not None and self.updates is not None:
            raise ValueError(both_lengths(self.epochs, self.updates))
        return self


def both_lengths(epochs: Any, updates: Any) -> str:
    """Return the error message for a job whose length is given both in epochs and in updates."""
    return f"epochs ({epochs}) and updates ({updates}) are both given; keep one and set the other to null"


class GroupSpec(Section):
    """Parameters that share options. A parameter belongs to the first group whose regex is found in its name."""

    match: Pattern = Field(description="regex searched in the parameter name; '' takes all")
    rate_factor: float = Field(default=1.0, ge=0, description="times the rate")
    weight_decay: float | None = Field(default=None, ge=0, description="null: the optimizer's")
    warmup_from: float | None = Field(
        default=None, ge=0, description="rate at update 0 of the warm-up; null: schedule.warmup.rate_from"
    )


class OptimizerSpec(Section):
    """The rule that turns gradients into weights."""

    rule: Literal["sgd", "adam", "adamw"] = Field(
        default="sgd", description="sgd with momentum, adam, or adam with decoupled weight decay"
    )
    rate: float = Field(default=0.01, gt=0, description="learning rate after warm-up, before the schedule")
    momentum: float = Field(default=0.937, ge=0, lt=1, description="sgd: momentum; adam and adamw: beta1")
    nesterov: bool = Field(default=True, description="sgd: look ahead along the momentum")
    weight_decay: float = Field(default=0.0005, ge=0, description="of the groups that do not give their own")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="adam and adamw: decay of the squared gradient")
    eps: float = Field(default=1e-8, gt=0, description="adam and adamw: added to the root of the squared gradient")
    groups: list[GroupSpec] = Field(
        default_factory=lambda: [
            GroupSpec(match=r"\.bias$", weight_decay=0.0),
            GroupSpec(match=r"\.bn\d*\.weight$", weight_decay=0.0),
            GroupSpec(match=""),
        ],
        description="by name, the first match wins",
    )


class WarmupSpec(Section):
    """Linear rise of rate and momentum at the start, as long as the larger of `epochs` and `updates`."""

    epochs: float | None = Field(default=3.0, ge=0, description="length in epochs")
    updates: int | None = Field(default=100, ge=0, description="length in updates")
    rate_from: float = Field(default=0.0, ge=0, description="rate at update 0")
    momentum_from: float | None = Field(
        default=0.8, ge=0, lt=1, description="momentum at update 0; null: no warm-up of momentum"
    )
    before_curve: bool = Field(
        default=False,
        description="true: the curve begins after the warm-up, which rises to the curve's first value, and ends at the "
        "same horizon (PaddleDetection); false: both begin at update 0 (YOLOv5)",
    )


class ScheduleSpec(Section):
    """Course of the learning rate over the job, as a factor of optimizer.rate."""

    name: Literal["cosine", "linear", "step", "one_cycle", "constant"] = Field(
        default="linear", description="shape of the curve"
    )
    final_factor: float = Field(default=0.01, ge=0, description="factor at the end (cosine, linear, one_cycle)")
    milestones: list[float] = Field(
        default_factory=list, description="step: epochs after which the rate is multiplied by gamma"
    )
    gamma: float = Field(default=0.1, gt=0, description="step: the multiplier")
    peak: Fraction = Field(default=0.3, description="one_cycle: where the peak lies, as a share of the job")
    per: Literal["epoch", "update"] = Field(
        default="epoch", description="the factor changes at each epoch (YOLOv5) or each update"
    )
    horizon_epochs: float | None = Field(
        default=None, gt=0, description="epochs over which the curve is drawn; null: the job's length"
    )
    warmup: WarmupSpec | None = Field(default=WarmupSpec(), description="null: no warm-up")

    @model_validator(mode="after")
    def _steps_are_named(self) -> Self:
        if self.name == "step" and not self.milestones:
            raise ValueError(
                "name is 'step' and milestones is empty; give the epochs of the steps, e.g. milestones: [60, 80]"
            )
        return self


class BackendSpec(Section):
    """The backend that trains."""

    name: str = Field(default="ddp", description="a plugin of kind `backends`: see `mtrain plugins list`")
    options: dict[str, Any] = Field(default_factory=dict, description="the backend plugin's own options")
    python: str | None = Field(default=None, description="interpreter of the ranks; null: the one that runs mtrain")


class LauncherSpec(Section):
    """What starts the ranks of one host."""

    name: str = Field(
        default="auto",
        description="a plugin of kind `launchers`: see `mtrain plugins list`; auto: as the backend needs",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the launcher plugin's own options")


class SshSpec(Section):
    """How the cluster `ssh` reaches hosts."""

    port: Port | None = Field(default=None, description="null: as ssh has it")
    user: Annotated[str, AfterValidator(_is_user)] | None = Field(default=None, description="null: as ssh has it")
    identity_file: str | None = Field(default=None, description="private key; null: as ssh has it")
    python: str | None = Field(
        default=None,
        description="interpreter on the hosts that has mtrain; null: the path of the one that runs mtrain here",
    )
    connect_timeout_s: Positive = Field(default=8, description="seconds for a host to answer")


class ClusterSpec(Section):
    """Hosts, ranks and ports, and what brings the job to the hosts."""

    name: str = Field(
        default="auto",
        description="what brings the job to the hosts, a plugin of kind `clusters`. ssh: this command starts all hosts; "
        "auto: this host alone, or several hosts that are each started by hand with the same command; manual: print "
        "that command for each",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the cluster plugin's own options")
    ips: list[HostName] = Field(
        default_factory=list, description="addresses of the hosts, the first is the master; empty: this machine"
    )
    nproc_per_node: PerHost | Literal["auto"] = Field(
        default="auto", description="ranks per host; auto: one per device, on CPU one"
    )
    slots: list[PerHost] | None = Field(
        default=None, description="ranks on each of ips, where they differ (a:2,b:4); null: nproc_per_node on each"
    )
    devices: DeviceNumbers | None = Field(default=None, description="numbers of the GPUs on every host; null: all")
    node_rank: int | None = Field(
        default=None, ge=0, description="this host's place in ips; null: found from its addresses"
    )
    master_addr: HostName | None = Field(default=None, description="null: the first of ips, or 127.0.0.1")
    master_port: Port | Literal["auto"] = Field(
        default="auto", description="rendezvous port of the ranks on the first host; auto: one that is free there"
    )
    control_port: Port | Literal["auto"] = Field(
        default="auto",
        description="where hosts that are started by hand meet, on the first one; auto: master_port + 1, or 29501",
    )
    start_port: Port | Literal["auto"] = Field(
        default="auto", description="first port of the ranks, for stacks that need one per rank"
    )
    launcher: str = Field(
        default="auto", description="former key of cluster.name (ssh, manual) and of launcher.name (torchrun, ...)"
    )
    interface: str | None = Field(
        default=None, description="network interface of the collectives; null: the one that owns this host's address"
    )
    ssh: SshSpec = Field(default=SshSpec(), description="former place of the options of the cluster `ssh`")
    forward_env: list[str] = Field(
        default_factory=list,
        description="further environment variables, NAME or NAME*, that the cluster `ssh` passes on to the other hosts",
    )
    failure_timeout_s: int = Field(
        default=60,
        ge=4,
        description="seconds within which a job ends when one of several hosts is silent or never joins",
    )
    max_restarts: int = Field(
        default=0, ge=0, description="times the job is started again from its newest checkpoint after a failure"
    )
    threads: PerHost | Literal["auto"] = Field(
        default="auto", description="CPU threads per rank; auto: 1 on CPU-only ranks that share cores"
    )
    log_dir: str | None = Field(default=None, description="folder of the per-rank logs; null: logs/ in the run folder")


class EvaluateSpec(Section):
    """How often and in what way the evaluation split is scored."""

    enabled: bool = Field(
        default=True,
        description="false: training needs no evaluation split, nothing is scored, and the last checkpoint counts as "
        "best",
    )
    every_epochs: Positive | None = Field(default=1, description="null: only at the end")
    every_updates: Positive | None = Field(default=None, description="instead of every_epochs")
    batch_size: Positive | None = Field(
        default=None, description="samples per rank and forward pass; null: the micro batch"
    )
    at_end: bool = Field(default=True, description="score the last weights, whatever every_epochs says")
    score: str | None = Field(
        default=None, description="the figure to maximise, as evaluations name it; null: the task's own"
    )
    max_detections: int = Field(
        default=100,
        ge=100,
        description="the best predictions of one picture that are scored; raise it where pictures hold more objects",
    )


class CheckpointSpec(Section):
    """The checkpoints from which a job can be resumed: how often they are written, and how many are kept."""

    every_updates: Positive | None = Field(default=None, description="one per this many updates")
    every_epochs: Positive | None = Field(default=1, description="one per this many epochs")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="one when this many minutes have passed"
    )
    keep_last: Positive = Field(default=2, description="newest ones kept")
    keep_best: int = Field(
        default=1, ge=0, description="best ones kept besides, by evaluate.score; of equal ones the first"
    )
    asynchronous: bool = Field(default=True, description="write while training goes on")


class ReportSpec(Section):
    """The run folder, the progress display, and the records and pictures that are written."""

    name: str | None = Field(default=None, description="run folder runs/<name>; null: the spec's name and a number")
    dir: str = Field(default="runs", description="where run folders are made")
    every_updates: Positive = Field(default=1, description="one record of losses per this many updates")
    tensorboard: bool = Field(default=True, description="write TensorBoard events")
    plots: bool = Field(default=True, description="results.png and val_batch.jpg")
    trace: Literal["none", "traffic", "state"] = Field(
        default="none",
        description="what `mtrain compare` has the ranks record after every update: traffic, the bytes sent and the "
        "seconds waited for each other so far; state, the bytes, and digests of samples, weights, averages and moments",
    )
    display: Literal["auto", "rich", "plain", "quiet"] = Field(
        default="auto", description="progress on the console; auto: rich on a terminal, plain lines elsewhere"
    )


class Spec(Section):
    """A whole spec: the complete description of a job."""

    model: ModelSpec = Field(default=ModelSpec(), description="the network, and the weights that it starts from")
    data: DataSpec = Field(default=DataSpec(), description="pictures and annotations")
    train: TrainSpec = Field(default=TrainSpec(), description="length, batch size, precision")
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="the rule that turns gradients into weights")
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="learning rate over the job")
    backend: BackendSpec = Field(default=BackendSpec(), description="the backend that trains")
    cluster: ClusterSpec = Field(default=ClusterSpec(), description="hosts, ranks and ports")
    launcher: LauncherSpec = Field(default=LauncherSpec(), description="what starts the ranks of one host")
    evaluate: EvaluateSpec = Field(default=EvaluateSpec(), description="when and how the evaluation split is scored")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="checkpoints: how often, how many")
    report: ReportSpec = Field(default=ReportSpec(), description="run folder, progress display, records")
    plugins: str | None = Field(
        default=None,
        description="a plugins.toml with local plugins; null: the one beside the spec, else in the current directory",
    )
