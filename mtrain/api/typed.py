"""The keys of a spec as types, for specs that are written in Python: editors complete them, type checkers check them.

``Spec(train={"epochs": 3})`` is a plain dict with the keys of a YAML file. Every function of ``mtrain`` takes one in place
of a file, and checks it as a file is checked. The types have the keys of all tasks that come with mtrain.

Written by scripts/spec-types from the sections of the spec; a test keeps them equal.
"""

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Literal, TypedDict


class Model(TypedDict, total=False):
    """The network, and the weights that it starts from."""

    name: str
    """a plugin of kind `models`: see `mtrain plugins list`; or a class of your own, PATH.py:Name or
    package.module:Name"""

    weights: str | None
    """what to start from (.safetensors, .pdparams, .pt, DCP folder, checkpoint, run); entries that fit are taken,
    the others are reported"""

    options: Mapping[str, Any]
    """the model plugin's own options"""

    pruned: Mapping[str, Sequence[int]] | None
    """sizes of the layers that `mtrain prune` has made smaller, as it writes them: [inputs, outputs] of a
    convolution or linear layer, [channels] of a BatchNorm; null: every layer is as the model has it"""

    framework: Literal["torch", "paddle"] | None
    """framework of the model; a backend of another one is refused at once; null: not said"""


class DataAugmentRandomCrop(TypedDict, total=False):
    """Random window of a training image that becomes the input (torchvision's RandomResizedCrop)."""

    scale: Sequence[float]
    """share of the image's area"""

    aspect_ratio: Sequence[float]
    """width / height of the window"""


class DataAugmentDistort(TypedDict, total=False):
    """Random change of colours in four steps; each is applied with the given probability, in random order."""

    form: Literal["linear", "enhance"]
    """linear: as in PaddleDetection until September 2023, with which PP-YOLOE was published; values saturate
    once, at the end; enhance: as in PaddleDetection since, with Pillow's ImageEnhance; values saturate after each
    step"""

    probability: float
    """of each step"""

    hue: float
    """linear: rotation of the chroma in YIQ, +- degrees; enhance: rotation of the hue in HSV, where
    PaddleDetection's 18 are 25.3 degrees"""

    saturation: Sequence[float]
    """factor of the distance to grey"""

    contrast: Sequence[float]
    """linear: factor of all values; enhance: of their distance to the mean grey of the whole image"""

    brightness: Sequence[float]
    """linear: grey levels (of 255) added to all values; enhance: factor of all values"""


class DataAugmentExpand(TypedDict, total=False):
    """Random placement of the image on a larger canvas."""

    probability: float
    """of an expansion"""

    ratio: float
    """largest canvas, as a multiple of the image's sides"""

    fill: Sequence[float]
    """colour around it: red, green, blue"""


class DataAugmentCrop(TypedDict, total=False):
    """Random crop to a window that holds the centre of at least one box (SSD: Liu et al. 2016, section 2.2)."""

    thresholds: Sequence[float]
    """one is drawn: some box overlaps the window by at least this IoU"""

    allow_no_crop: bool
    """one more choice beside the thresholds: no crop"""

    scaling: Sequence[float]
    """square root of the window's share of the image's area"""

    aspect_ratio: Sequence[float]
    """width / height of the window over those of the image"""

    num_attempts: int
    """windows tried for a threshold before the next one is drawn"""


class DataAugment(TypedDict, total=False):
    """Augmentation of training images: a random window, then changes of position, shape and colours, and flips."""

    degrees: float
    """rotation, +- degrees"""

    translate: float
    """shift, +- fraction of the side"""

    scale: float
    """zoom, 1 +- this"""

    shear: float
    """+- degrees"""

    perspective: float
    """+- per pixel"""

    hsv_h: float
    """hue gain, +- fraction"""

    hsv_s: float
    """saturation gain, +- fraction"""

    hsv_v: float
    """value gain, +- fraction"""

    flip_ud: float
    """probability of an up-down flip"""

    flip_lr: float
    """probability of a left-right flip"""

    random_crop: DataAugmentRandomCrop | None
    """with `resize: crop`: a random window becomes the input; null: the centre, as in evaluation"""

    albumentations: str | None
    """pipeline in place of all other keys of augment: a file of albumentations.save (.yml, .json), or
    FILE.py:FUNCTION, relative to the spec"""

    mosaic: float
    """probability of a mosaic"""

    mosaic9: float
    """of the mosaics, the share that uses nine images instead of four"""

    mixup: float
    """probability of mixing a mosaic with another one"""

    close_mosaic_epochs: int
    """no mosaic and no mixup in this many last epochs"""

    sizes: Sequence[int] | None
    """sides of the network input in pixels, one drawn for each update (multi-scale training); null: image_size,
    or multi_scale around it"""

    multi_scale: float
    """x: each update draws its input size from the multiples of 32 between image_size * (1 - x) and image_size *
    (1 + x); needs `resize: letterbox`; YOLOv5's --multi-scale is 0.5; 0: off"""

    interpolations: Sequence[Literal["nearest", "linear", "area", "cubic", "lanczos4"]]
    """with `resize: stretch`: one drawn for each update"""

    distort: DataAugmentDistort | None
    """with `resize: stretch`; null: none"""

    expand: DataAugmentExpand | None
    """with `resize: stretch`; null: none"""

    crop: DataAugmentCrop | None
    """with `resize: stretch`; null: none"""

    random_scale: Sequence[float]
    """factor of the size at which the image fits the input; a random window of what is larger, a random place of
    what is smaller"""


class Data(TypedDict, total=False):
    """The data set, and how it is loaded. A task's own section derives from this one."""

    format: str
    """a plugin of kind `datasets`: see `mtrain plugins list`; or a data set of your own, PATH.py:Name or
    package.module:Name"""

    root: str | None
    """folder of the data set; null: where the plugin keeps its own"""

    train: str | None
    """the training split: a file, folder or list, as the format has it (docs/data.md); null: the format's usual
    place"""

    val: str | None
    """the same for the evaluation split"""

    images: str | None
    """folder of the images; null: the format's usual place"""

    names: Sequence[str] | None
    """class names in label order; null: as the data set says"""

    options: Mapping[str, Any]
    """the data set plugin's own options"""

    workers: int | Literal["auto"]
    """loader processes per rank; 0: in the rank itself; auto: the host's cores divided by its ranks, less one, as
    far as memory allows"""

    prefetch: int | Literal["auto"]
    """micro batches prepared ahead per rank; auto: as many as are used in 2 s, 4 to 64, as far as memory
    allows"""

    image_size: int
    """side of the square network input, in pixels"""

    resize: Literal["crop", "letterbox", "stretch"] | Literal["letterbox", "stretch"]
    """crop: the shorter side to image_size / crop_share, then the central square, or in training a random window;
    letterbox: keep the image's shape, fill up with grey; stretch: both sides to image_size"""

    max_pixels: int
    """pixels of the largest image that is decoded: a small file can hold an enormous image"""

    split: float | None
    """share of the images of `train` (null: of all there are) that becomes the evaluation split; it depends on
    names and split_seed alone"""

    split_seed: int
    """another one chooses other images for `split`"""

    crop_share: float
    """with `resize: crop`: share of the shorter side that the central square has"""

    augment: DataAugment
    """of the training split"""

    skip_missing: bool
    """leave out images that are annotated but not there, and say how many"""

    cache: Literal["none", "ram", "disk"]
    """where decoded images are kept"""

    cache_dir: str | None
    """folder of the disk cache; null: the user's cache folder"""

    decode: Literal["exact", "fast"]
    """of images for evaluation and prediction; exact: every pixel of the file; fast: JPEGs of at least twice the
    needed size are decoded at 1/2, 1/4 or 1/8, as those for training always are"""

    image_weights: bool
    """each epoch draws its images with replacement, those more often whose classes are rare or had a low AP in
    the last evaluation before the epoch; YOLOv5's --image-weights"""

    tokenizer: str
    """bytes: each byte of UTF-8 is a token; else a tokenizer.json, or the folder of a model with one"""

    end_token: str | None
    """token after each document; null: as the tokenizer's files say"""

    chat_template: str | None
    """how conversations (data.options.messages) become text: chatml, or a file in Jinja; null: the template in
    the folder of the tokenizer"""

    length: int
    """tokens in a row; documents are packed into rows, and none sees another one"""

    nondeterministic: Literal["refuse", "allow"]
    """allow: accept samples that differ when they are read again, so that a resumed job may train on others"""


class TrainEma(TypedDict, total=False):
    """Exponential moving average of the weights, which is evaluated and exported in their place."""

    decay: float
    """per update; 0: no average"""

    ramp: float
    """updates over which the decay rises: decay * (1 - exp(-k / ramp))"""

    rule: Literal["ramp", "threshold"]
    """ramp: YOLOv5's, see `ramp`; threshold: PaddleDetection's, min(decay, (1 + k) / (10 + k)), corrected for its
    start"""


class TrainDistil(TypedDict, total=False):
    """Imitation of a trained model, the teacher, while training."""

    teacher: str | None
    """what to imitate: a run folder (its best checkpoint), a checkpoint, or a file of weights; it must be
    given"""

    model: str | None
    """the teacher's model, where `teacher` is a file of weights; null: the teacher's run says it"""

    options: Mapping[str, Any]
    """options of that `model`"""

    labels: float
    """factor of the model's own loss, on the labels of the data"""

    outputs: float
    """factor of the difference of the outputs: of probabilities, or of what else the models predict"""

    features: float
    """factor of the difference of the attention maps (not for vision transformers)"""

    temperature: float
    """number by which class logits are divided before they are compared as probabilities"""


class TrainQuantise(TypedDict, total=False):
    """Training with weights and inputs of convolutions and linear layers rounded to 8 bits, for `mtrain quantise`."""

    start: int
    """update from which ranges of inputs are observed; the next ones round"""

    freeze: int | None
    """update from which the ranges stay as they are; null: they move to the end"""

    exclude: Sequence[str]
    """regexes of names of layers that are not rounded"""


class TrainPrune(TypedDict, total=False):
    """Pruning while training: weights that are set to 0 and stay so, and an L1 penalty on the scales of BatchNorms."""

    sparsity: float
    """share of each pruned array that is 0 at the end; 0: no masks"""

    match: str
    """regex searched in the names of trained arrays with two or more axes; '' takes all of them"""

    start: float
    """where in the job the share of zeros begins to rise, 0 to 1"""

    end: float
    """where in the job it reaches `sparsity`"""

    every_updates: int
    """updates from one choice of zeros to the next"""

    norm_l1: float
    """weight of the L1 penalty on the scales of BatchNorms, for `mtrain prune --by bn` afterwards; applied after
    each update as soft thresholding, times the learning rate"""


class Train(TypedDict, total=False):
    """Length, batch size, precision and further settings of training."""

    epochs: int | None
    """passes over the training split; give this or `updates`"""

    updates: int | None
    """optimizer steps in all; give this or `epochs`"""

    batch_size: int
    """GLOBAL batch: samples per update over all ranks"""

    reference_batch_size: int
    """the global batch for which learning rate and weight decay are given"""

    learning_rate_scaling: Literal["none", "linear", "sqrt", "yolov5"]
    """none: learning rate as written; linear, sqrt: learning rate x (batch/reference) or its root; yolov5:
    learning rate as written, weight decay x batch/reference"""

    accumulate: int | Literal["auto"]
    """micro batches per update; auto: as few as max_micro_batch allows"""

    max_micro_batch: int | Literal["auto"] | None
    """largest micro batch of one rank that `accumulate: auto` may choose; null: no limit; auto: the largest that
    fits into memory, measured once before the run starts, see docs/memory.md"""

    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"]
    """of the forward and backward pass; auto: bf16 if the devices of all ranks are faster with it (CUDA with
    compute capability 8 or newer), else fp32; fp64 is for proofs of equality"""

    clip_norm: float | None
    """largest global L2 norm of the gradient; null: no limit"""

    ema: TrainEma | None
    """null: no average"""

    distil: TrainDistil | None
    """imitate a trained model: `{teacher: runs/big}`; null: learn from labels alone"""

    sync_batchnorm: bool
    """BatchNorm statistics over all ranks; works on CPU too"""

    quantise: TrainQuantise | None
    """learn weights and ranges for 8-bit integers; null: no rounding"""

    seed: int
    """of weights, order and augmentation"""

    channels_last: bool | Literal["auto"]
    """memory layout of torch's convolutions; false: contiguous; auto: the fastest known for the device"""

    kernels: Literal["auto", "framework"]
    """auto: mtrain's own kernels for the CPU where a C compiler is there; framework: the framework's alone"""

    compile: bool | Literal["blocks"]
    """compile the model where the framework can; blocks: each of the blocks that the model names, which share
    what is compiled, so that deep models start soon"""

    freeze: Sequence[str]
    """regexes of parameter names that are not trained"""

    prune: TrainPrune | None
    """zeros and an L1 penalty while training, see docs/pruning.md; null: none"""

    recompute: bool | Sequence[str]
    """compute inner results of blocks again in the backward pass, for less memory and the same bits: true: the
    blocks that the model names; or regexes of names of its submodules; see docs/memory.md"""

    patience: int | None
    """stop after this many evaluations without a better score"""

    max_nonfinite: int
    """stop with an error after this many non-finite updates in a row"""


class OptimizerGroups(TypedDict, total=False):
    """Parameters that share options. A parameter belongs to the first group whose regex is found in its name."""

    match: str
    """regex searched in the parameter name; '' takes all"""

    learning_rate_factor: float
    """times the learning rate"""

    weight_decay: float | None
    """null: the optimizer's"""

    warmup_from: float | None
    """learning rate at update 0 of the warm-up; null: schedule.warmup.learning_rate_from"""


class Optimizer(TypedDict, total=False):
    """The rule that turns gradients into weights."""

    rule: Literal["sgd", "adam", "adamw", "lion", "rmsprop", "adadelta", "lamb"]
    """sgd with momentum, adam, adamw (decoupled weight decay), lion, rmsprop, adadelta, or lamb, which needs a
    backend that keeps arrays whole; see docs/backends.md"""

    learning_rate: float
    """learning rate after warm-up, before the schedule"""

    momentum: float
    """sgd and rmsprop: momentum; adadelta: unused; others: beta1"""

    nesterov: bool
    """sgd: look ahead along the momentum"""

    weight_decay: float
    """of the groups that do not give their own"""

    beta2: float
    """decay of the squared gradient; lion: of the mean. Usual are 0.999 for adam, adamw and lamb, 0.99 for lion
    and rmsprop, 0.9 for adadelta"""

    eps: float
    """added to the root of the squared gradient; adadelta: to the squares; lion: unused. Usual is 1e-6 for
    adadelta and lamb"""

    groups: Sequence[OptimizerGroups]
    """by name, the first match wins"""


class ScheduleWarmup(TypedDict, total=False):
    """Linear rise of learning rate and momentum at the start, as long as `epochs` or `updates` says, or the larger of both."""

    epochs: float | None
    """length in epochs; where `updates` alone is given, that is the length"""

    updates: int | None
    """length in updates; where `epochs` alone is given, that is the length"""

    learning_rate_from: float
    """learning rate at update 0"""

    momentum_from: float | None
    """sgd and rmsprop: momentum at update 0; null: no warm-up of momentum. Other rules keep their betas"""

    before_curve: bool
    """true: the curve begins after the warm-up, which rises to the curve's first value, and ends at the same
    horizon (PaddleDetection); false: both begin at update 0 (YOLOv5)"""


class Schedule(TypedDict, total=False):
    """Course of the learning rate over the job, as a factor of optimizer.learning_rate."""

    name: Literal["cosine", "linear", "polynomial", "exponential", "step", "one_cycle", "constant"]
    """shape of the curve"""

    final_factor: float
    """factor at the end (cosine, linear, polynomial, exponential, one_cycle)"""

    power: float
    """polynomial: the power of the remaining share of the job"""

    milestones: Sequence[float]
    """step: epochs after which the learning rate is multiplied by gamma"""

    gamma: float
    """step: the multiplier"""

    peak: float
    """one_cycle: where the peak lies, as a share of the job; as torch's OneCycleLR without its momentum"""

    per: Literal["epoch", "update"]
    """the factor changes at each epoch (YOLOv5) or each update"""

    horizon_epochs: float | None
    """epochs over which the curve is drawn; null: the job's length"""

    warmup: ScheduleWarmup | None
    """null: no warm-up; where the section is not given, YOLOv5's, with momentum_from 0.8"""


class Backend(TypedDict, total=False):
    """The backend that trains."""

    name: str
    """a plugin of kind `backends`: see `mtrain plugins list`"""

    options: Mapping[str, Any]
    """the backend plugin's own options"""

    python: str | None
    """interpreter of the ranks; null: the one that runs mtrain"""


class Parallel(TypedDict, total=False):
    """The mesh of ranks: replicate x shard x tensor x pipeline. Ranks with consecutive numbers are of one tensor group."""

    replicate: int
    """groups of ranks that each hold the whole model among them (hybrid sharding, HSDP)"""

    shard: int | None
    """ranks among which a group splits every array; null: all ranks that remain"""

    tensor: int
    """ranks that compute the same samples together, each a part of every layer (tensor parallelism)"""

    sequence: bool
    """between the layers that a tensor group shares, each of its ranks keeps a part of every text (sequence
    parallelism)"""

    pipeline: int
    """stages one after the other, each with a part of the layers"""

    plan: Mapping[str, str]
    """how a tensor group shares layers, by patterns of their names, for example {'layers.*.mlp.up_proj':
    colwise}; empty: the model's own plan"""


class Cluster(TypedDict, total=False):
    """Hosts, ranks and ports, and what brings the job to the hosts."""

    name: str
    """what brings the job to the hosts, a plugin of kind `clusters`. ssh: this command starts all hosts; auto:
    this host alone, or several hosts that are each started by hand with the same command; manual: print that
    command for each"""

    options: Mapping[str, Any]
    """the cluster plugin's own options"""

    ips: Sequence[str]
    """addresses of the hosts, the first is the master; empty: this machine"""

    nodes: int | None
    """number of hosts to ask a scheduler for, where none is named; null: as many as ips, or one"""

    min_nodes: int | None
    """an elastic job goes on while at least this many of its hosts are there, and takes the others back; null:
    all of them are needed"""

    shards: int | None
    """equal parts of each micro batch of the job, on which alone its results depend, whoever computes them; null:
    one per rank, in an elastic job one per rank of all its hosts"""

    sharing: Literal["auto", "ranks", "passes"]
    """how shards come to fewer hosts. ranks: each host starts more ranks, one per shard, to the same bits;
    passes: a rank computes several shards, one after the other; auto: ranks on CPUs, passes on devices"""

    nproc_per_node: int | Literal["auto"]
    """ranks per host; auto: one per device, on CPU one"""

    slots: Sequence[int] | None
    """ranks on each of ips, where they differ (a:2,b:4); null: nproc_per_node on each"""

    devices: Sequence[int] | None
    """numbers of the GPUs on every host; null: all"""

    node_rank: int | None
    """this host's place in ips; null: found from its addresses"""

    master_addr: str | None
    """null: the first of ips, or 127.0.0.1"""

    master_port: int | Literal["auto"]
    """rendezvous port of the ranks on the first host; auto: one that is free there"""

    control_port: int | Literal["auto"]
    """where hosts that are started by hand meet, on the first one; auto: master_port + 1, or 29501"""

    start_port: int | Literal["auto"]
    """first port of the ranks, for stacks that need one per rank"""

    interface: str | None
    """network interface of the collectives; null: the one that owns this host's address"""

    forward_env: Sequence[str]
    """further environment variables, NAME or NAME*, that the cluster `ssh` passes on to the other hosts"""

    failure_timeout_s: int
    """seconds within which a job ends when one of several hosts is silent or never joins"""

    join_timeout_s: int | None
    """seconds within which every host must have joined before the job starts; null: failure_timeout_s. For hosts
    that a scheduler starts one after the other"""

    grace_s: int
    """seconds that ranks have after SIGTERM to reach the end of an update and to collect their state; those that
    hang are then ended. Writing the last checkpoint is not cut off"""

    max_restarts: int
    """times the job is started again from its newest checkpoint after a failure"""

    threads: int | Literal["auto"]
    """CPU threads per rank; auto: the cores of the host among its ranks, in an elastic job 1"""

    log_dir: str | None
    """folder of the per-rank logs; null: logs/ in the run folder"""

    rejoin_s: int
    """seconds that an elastic job waits for hosts that were lost before it goes on without them"""


class Launcher(TypedDict, total=False):
    """The launcher, which starts the ranks of one host."""

    name: str
    """a plugin of kind `launchers`: see `mtrain plugins list`; auto: as the backend needs"""

    options: Mapping[str, Any]
    """the launcher plugin's own options"""


class Evaluate(TypedDict, total=False):
    """How often and in what way the evaluation split is scored."""

    enabled: bool
    """false: training needs no evaluation split, nothing is scored, and the last checkpoint counts as best"""

    every_epochs: int | None
    """null: only at the end"""

    every_updates: int | None
    """instead of every_epochs"""

    batch_size: int | None
    """samples per rank and forward pass; null: the micro batch"""

    augment: bool
    """predict on varied copies of each sample too (mirrored, smaller), and join the predictions (test-time
    augmentation): slower, and often better"""

    at_end: bool
    """score the last weights, whatever every_epochs says"""

    score: str | None
    """the metric to maximise, as evaluations name it; null: the task's own"""

    max_detections: int
    """the best predictions of one image that are scored; raise it where images hold more objects"""

    metrics: Sequence[str]
    """functions or classes, PATH.py:Name or package.module:Name: a function has parameters named like predictions
    and targets, an object has update(predictions, targets) and compute()"""

    metric_options: Mapping[str, Mapping[str, Any]]
    """options of metrics, by the metric's name without its path"""

    lower_is_better: bool
    """whether the best checkpoint has the lowest first metric"""


class Checkpoint(TypedDict, total=False):
    """The checkpoints from which a job can be resumed: how often they are written, and how many are kept."""

    every_updates: int | None
    """one per this many updates"""

    every_epochs: int | None
    """one per this many epochs"""

    every_minutes: float | None
    """one when this many minutes have passed"""

    keep_last: int
    """newest ones kept"""

    keep_best: int
    """best ones kept besides, by evaluate.score; of equal ones the first"""

    asynchronous: bool
    """write while training goes on"""

    copy_to: str | None
    """where each checkpoint is copied to as well, in the background: s3://bucket/prefix, file:///mnt/backup, or
    any other address of fsspec, without a password; the run's name is added. null: nowhere"""

    copies_kept: int
    """newest copies kept at copy_to, and keep_best of the best besides"""

    copy_check: Literal["read", "size"]
    """how a copy is verified: read, every byte is read back and its SHA-256 compared; size, sizes alone"""

    copy_timeout_s: float
    """seconds in which nothing of a copy arrives, before it is given up; a copy that goes on may take any time"""


class Report(TypedDict, total=False):
    """The run folder, the progress display, and the records and images that are written."""

    name: str | None
    """run folder runs/<name>; null: the spec's name and a number"""

    dir: str
    """where run folders are made"""

    every_updates: int
    """one record of losses per this many updates"""

    tensorboard: bool
    """write TensorBoard events: short for the reporter `tensorboard`"""

    reporters: Mapping[str, Mapping[str, Any] | bool]
    """what else receives the records, by name: plugins of kind `reporters` (csv, mlflow ...), or a class or
    function of your own, PATH.py:Name; each with its options, or true, or false to leave it out"""

    plots: bool
    """results.png, val_batch.jpg, inputs.jpg and report.html"""

    trace: Literal["none", "traffic", "state"]
    """what `mtrain compare` has the ranks record after every update: traffic, the bytes sent and the seconds
    waited for each other so far; state, the bytes, and digests of samples, weights, averages and moments"""

    stragglers: bool
    """name the ranks that the others wait for, as a warning and in the records of updates; for ranks on CPUs"""

    profile: Sequence[int] | None
    """the first and the last update of which each rank writes a profile, profile/rank-N.json in the run folder,
    for example [10, 12]; null: none"""

    peak_tflops: float | None
    """floating-point operations per second of one device at the precision of training, in 10^12, for the
    utilisation (MFU) of language models; null: the published one for bf16 on an A100, H100 or H200, else none is
    shown"""

    log_mb: int | None
    """largest size of the log of a rank or of a starter, in units of 2^20 bytes: of a longer one, the first
    quarter and the newest lines are kept; null: logs are kept whole"""

    all_ranks: bool
    """of a script: show what every rank prints, each line with the number of its rank; false: what rank 0
    prints"""

    metrics_port: int | None
    """port of every host at which Prometheus can read the progress of a training job; null: none is opened"""

    metrics_address: str
    """address at which that port is opened; `host`: the address of each host in the job; 0.0.0.0: all addresses
    of the host"""

    display: Literal["auto", "rich", "plain", "quiet", "verbose"]
    """progress on the console; auto: rich on a terminal, one live output in a notebook, plain lines elsewhere;
    verbose: a line for every update"""


class Generate(TypedDict, total=False):
    """How `mtrain predict` continues a text."""

    tokens: int
    """most tokens that are added to a text"""

    temperature: float
    """0: the most likely token each time; above: drawn, the wider the larger"""

    top_p: float
    """draws from the likeliest tokens that together have this probability"""


class Spec(TypedDict, total=False):
    """A whole spec: the complete description of a job, as far as no task, model or backend adds to it."""

    _BASE_: str | Sequence[str]
    """a YAML file or shipped config, or several, whose values this spec changes"""

    model: Model
    """the network, and the weights that it starts from"""

    data: Data
    """the data set, and how it is loaded"""

    train: Train
    """length, batch size, precision"""

    optimizer: Optimizer
    """the rule that turns gradients into weights"""

    schedule: Schedule
    """learning rate over the job"""

    backend: Backend
    """the backend that trains"""

    parallel: Parallel
    """the mesh of ranks: replicas, shards, tensor groups, stages"""

    cluster: Cluster
    """hosts, ranks and ports"""

    launcher: Launcher
    """what starts the ranks of one host"""

    evaluate: Evaluate
    """when and how the evaluation split is scored"""

    checkpoint: Checkpoint
    """checkpoints: how often, how many"""

    report: Report
    """run folder, progress display, records"""

    plugins: str | None
    """a plugins.toml with local plugins; null: the one beside the spec, else in the current directory"""

    generate: Generate
    """How `mtrain predict` continues a text."""


for _section in (
    Model,
    DataAugmentRandomCrop,
    DataAugmentDistort,
    DataAugmentExpand,
    DataAugmentCrop,
    DataAugment,
    Data,
    TrainEma,
    TrainDistil,
    TrainQuantise,
    TrainPrune,
    Train,
    OptimizerGroups,
    Optimizer,
    ScheduleWarmup,
    Schedule,
    Backend,
    Parallel,
    Cluster,
    Launcher,
    Evaluate,
    Checkpoint,
    Report,
    Generate,
    Spec,
):
    # A running notebook completes keywords from the signature, which such classes do not have by themselves.
    _keys = [Parameter(key, Parameter.KEYWORD_ONLY) for key in _section.__annotations__]
    type.__setattr__(_section, "__signature__", Signature(_keys))
