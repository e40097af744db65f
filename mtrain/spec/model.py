"""The core's schema of a spec: the keys that every job's YAML file may contain, with defaults, units and ranges.

Each section of the file has a class. Every key has a description, which ``config explain`` and docs/spec.md show;
a task adds keys and sections of its own (``building.py``). Nothing here reads a file (``config.py`` does) or
imports a framework.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from mtrain.spec import references
from mtrain.spec.addresses import checked_address
from mtrain.spec.hostnames import checked_host, checked_listener
from mtrain.spec.identifiers import checked_run_name
from mtrain.spec.parallel import ParallelSpec
from mtrain.spec.pathnames import PathText, checked_path
from mtrain.spec.section import Count, Positive, Section, as_validator
from mtrain.spec.training import OptimizerSpec, ScheduleSpec, TrainSpec


def _is_range(ends: list[int]) -> list[int]:
    if ends[0] > ends[1]:
        raise ValueError(f"given {ends}; expected the first and the last update, the smaller one first")
    return ends


def _each_once(devices: list[int]) -> list[int]:
    if len(set(devices)) < len(devices):
        raise ValueError(f"given {devices}, expected device numbers, each once: two ranks do not share a device")
    return devices


PerHost = Annotated[int, Field(gt=0, le=1024)]
"""Number of processes or threads on a host. The limit keeps a typing error from starting a million of them."""
Port = Annotated[int, Field(gt=0, lt=65536)]
Seconds = Annotated[float, Field(gt=0)]
DeviceNumbers = Annotated[list[Count], AfterValidator(_each_once)]
HostName = Annotated[str, AfterValidator(as_validator(checked_host))]


class ModelSpec(Section):
    """The network, and the weights that it starts from."""

    name: Annotated[str, references.May()] = Field(
        default="yolov5n", description="a plugin of kind `models`, or PATH.py:Name"
    )
    weights: PathText | None = Field(
        default=None,
        description="start weights (.safetensors, .pdparams, .pt, DCP folder, checkpoint, run); entries that fit are "
        "taken",
    )
    weights_key: str | None = Field(
        default=None,
        description="which set of weights in that file, such as teacher; null: averaged ones, else the usual key, "
        "else the only set",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the model's own options")
    pruned: dict[str, Annotated[list[Positive], Field(min_length=1, max_length=2)]] | None = Field(
        default=None, description="sizes of the layers that `mtrain prune` has made smaller, as it writes them"
    )

    @property
    def declared_framework(self) -> str | None:
        """Framework that the model needs, as the spec says; None: the spec does not say, or it runs on any."""
        return None


class DataSpec(Section):
    """The data set, and how it is loaded. A task's own section derives from this one.

    Relative paths are taken from `root`, and `root` from the current directory.
    """

    format: Annotated[str, references.May()] = Field(
        default="digits", description="a plugin of kind `datasets`, or PATH.py:Name"
    )
    root: PathText | None = Field(
        default=None, description="folder of the data set; null: where the plugin keeps its own"
    )
    train: PathText | None = Field(
        default=None,
        description="the training split: a file, folder or list (docs/data.md); null: the format's usual place",
    )
    val: PathText | None = Field(default=None, description="the evaluation split")
    images: PathText | None = Field(default=None, description="folder of the images; null: the format's usual place")
    names: list[str] | None = Field(default=None, description="class names in label order; null: as the data set says")
    options: dict[str, Any] = Field(default_factory=dict, description="the data set's own options")
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        default="auto",
        description="loader processes per rank; 0: in the rank itself; auto: by cores, ranks and memory of the host",
    )
    prefetch: Positive | Literal["auto"] = Field(
        default="auto", description="micro batches prepared ahead per rank; auto: those of 2 s, 4 to 64"
    )

    @property
    def input_side(self) -> int:
        """Side of the network's square input in pixels, on which the shapes of a model may depend; 0: it has none."""
        return 0


class BackendSpec(Section):
    """The backend that trains."""

    name: str = Field(default="ddp", description="a plugin of kind `backends`")
    options: dict[str, Any] = Field(default_factory=dict, description="the backend's own options")
    python: PathText | None = Field(
        default=None, description="interpreter of the ranks; null: the one that runs mtrain"
    )


class LauncherSpec(Section):
    """The launcher, which starts the ranks of one host."""

    name: str = Field(default="auto", description="a plugin of kind `launchers`; auto: as the backend needs")
    options: dict[str, Any] = Field(default_factory=dict, description="the launcher's own options")


class HangSpec(Section):
    """Ranks that hang: after how long something is said of it, and after how long the job ends. null: never."""

    stopped_s: Seconds | None = Field(
        default=10.0, description="a rank, or a child of one, that a signal has stopped is named"
    )
    still_s: Seconds | None = Field(
        default=45.0, description="no progress, and no rank takes 5 % of a core: who waits where is reported"
    )
    slow_s: Seconds | None = Field(
        default=60.0,
        description="no progress while ranks compute or poll (Horovod, GPUs), for ten times as long as ever: a remark",
    )
    lock_s: Seconds | None = Field(default=20.0, description="all ranks wait for the lock of a build that nobody makes")
    end_s: Seconds | Literal["auto"] | None = Field(
        default="auto",
        description="the job ends if a rank is stopped or nothing moves; auto: 600, never for a script that does not "
        "import mtrain",
    )


class ClusterSpec(Section):
    """Hosts, ranks and ports, and what brings the job to the hosts."""

    name: str = Field(
        default="auto",
        description="a plugin of kind `clusters`. auto: this host, or the same command typed on each host; ssh: this "
        "command starts all; manual: print the command for each",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the cluster's own options")
    ips: list[HostName] = Field(default_factory=list, description="addresses of the hosts; empty: this machine")
    nodes: PerHost | None = Field(
        default=None, description="hosts to ask a scheduler for; null: as many as ips, or one"
    )
    min_nodes: PerHost | None = Field(
        default=None, description="hosts that an elastic job needs (docs/elastic.md); null: all"
    )
    shards: PerHost | None = Field(
        default=None,
        description="equal parts of each micro batch of the job, on which alone its results depend; null: one per "
        "rank of all hosts",
    )
    sharing: Literal["auto", "ranks", "passes"] = Field(
        default="auto",
        description="on fewer hosts. ranks: more ranks on each, to the same bits; passes: a rank computes several "
        "shards; auto: ranks on CPUs, passes on devices",
    )
    nproc_per_node: PerHost | Literal["auto"] = Field(
        default="auto", description="ranks per host; auto: one per device, on CPU one"
    )
    slots: list[PerHost] | None = Field(default=None, description="ranks on each of ips, if they differ (a:2,b:4)")
    devices: DeviceNumbers | None = Field(default=None, description="numbers of the GPUs on every host; null: all")
    node_rank: int | None = Field(default=None, ge=0, description="this host's place in ips; null: by its addresses")
    master_addr: HostName | None = Field(default=None, description="null: the first of ips, or 127.0.0.1")
    master_port: Port | Literal["auto"] = Field(
        default="auto", description="port of the ranks' rendezvous on the first host; auto: a free one"
    )
    control_port: Port | Literal["auto"] = Field(
        default="auto", description="port where hosts started by hand meet; auto: master_port + 1, or 29501"
    )
    start_port: Port | Literal["auto"] = Field(default="auto", description="first port of the ranks, if each needs one")
    interface: str | None = Field(
        default=None, description="network interface of the collectives; null: that of this host's address"
    )
    forward_env: list[str] = Field(
        default_factory=list, description="further environment variables for other hosts, NAME or NAME*"
    )
    failure_timeout_s: int = Field(default=60, ge=4, description="a job ends when a host is silent for so long")
    join_timeout_s: int | None = Field(
        default=None, ge=4, description="within which every host must have joined; null: failure_timeout_s"
    )
    grace_s: int = Field(
        default=20,
        ge=1,
        description="after SIGTERM, for the rest of an update and to collect the state; writing the checkpoint is not"
        " cut off",
    )
    max_restarts: int = Field(
        default=0, ge=0, description="times a failed job is started again from its newest checkpoint"
    )
    threads: PerHost | Literal["auto"] = Field(
        default="auto", description="CPU threads per rank; auto: the host's cores among its ranks, in an elastic job 1"
    )
    log_dir: PathText | None = Field(
        default=None, description="folder of the per-rank logs; null: logs/ in the run folder"
    )

    rejoin_s: int = Field(default=5, ge=0, description="time that an elastic job waits for lost hosts")
    hangs: HangSpec = Field(default=HangSpec(), description="ranks that hang: when it is said, and when the job ends")

    @property
    def joining_s(self) -> int:
        """Return the seconds within which every host must have joined before the job starts."""
        return self.failure_timeout_s if self.join_timeout_s is None else self.join_timeout_s


class EvaluateSpec(Section):
    """How often and in what way the evaluation split is scored."""

    enabled: bool = Field(default=True, description="false: nothing is scored, and the last checkpoint counts as best")
    every_epochs: Positive | None = Field(default=1, description="null: only at the end")
    every_updates: Positive | None = Field(default=None, description="instead of every_epochs")
    batch_size: Positive | None = Field(
        default=None, description="samples per rank and forward pass; null: the micro batch"
    )
    augment: bool = Field(
        default=False, description="test-time augmentation: also predict on mirrored and smaller copies"
    )
    at_end: bool = Field(default=True, description="score the last weights, whatever every_epochs says")
    score: str | None = Field(default=None, description="the metric to maximise; null: the task's own")


class CheckpointSpec(Section):
    """The checkpoints from which a job can be resumed: how often they are written, and how many are kept."""

    every_updates: Positive | None = Field(default=None, description="one per this many updates")
    every_epochs: Positive | None = Field(default=1, description="one per this many epochs")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="one when this many minutes have passed"
    )
    keep_last: Positive = Field(default=2, description="newest ones kept")
    keep_best: int = Field(default=1, ge=0, description="best ones kept besides, by evaluate.score")
    asynchronous: bool = Field(default=True, description="write while training goes on")
    copy_to: Annotated[str, AfterValidator(as_validator(checked_address)), AfterValidator(checked_path)] | None = Field(
        default=None,
        description="where each checkpoint is copied to: s3://bucket/prefix, file:///mnt/backup, or another address "
        "of fsspec",
    )
    copies_kept: Positive = Field(default=2, description="newest copies kept, and keep_best of the best")
    copy_check: Literal["read", "size"] = Field(
        default="read", description="read: every byte is read back and its SHA-256 compared; size: sizes alone"
    )
    copy_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="a copy is given up if nothing of it arrives for so long"
    )


class ReportSpec(Section):
    """The run folder, the progress display, and the records and images that are written."""

    name: Annotated[str, AfterValidator(as_validator(checked_run_name))] | None = Field(
        default=None, description="run folder runs/<name>; null: the spec's name and a number"
    )
    dir: PathText = Field(default="runs", description="where run folders are made")
    every_updates: Positive = Field(default=1, description="one record of losses per this many updates")
    tensorboard: bool = Field(default=True, description="write TensorBoard events")
    reporters: Annotated[dict[str, dict[str, Any] | bool], references.May()] = Field(
        default_factory=dict,
        description="plugins of kind `reporters` (csv, mlflow ...) or PATH.py:Name, each with its options, true, or "
        "false (docs/reporters.md)",
    )
    plots: bool = Field(default=True, description="results.png, val_batch.jpg, inputs.jpg and report.html")
    trace: Literal["none", "traffic", "state"] = Field(
        default="none",
        description="recorded after every update: traffic, bytes sent and seconds waited; state, these, and digests "
        "of samples, weights, averages and moments",
    )
    profile: Annotated[list[Positive], Field(min_length=2, max_length=2), AfterValidator(_is_range)] | None = Field(
        default=None, description="first and last update of which each rank writes profile/rank-N.json"
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="peak of one device in 10^12 operations per second, for the MFU of language models; null: the "
        "published one of an A100, H100 or H200",
    )
    log_mb: Positive | None = Field(
        default=64, description="largest log in MiB: of a longer one, the first quarter and the newest lines are kept"
    )
    all_ranks: bool = Field(default=False, description="of a script: show what every rank prints, not rank 0 alone")
    metrics_port: Port | None = Field(default=None, description="port of every host for Prometheus")
    metrics_address: Annotated[str, AfterValidator(checked_listener)] = Field(
        default="127.0.0.1", description="its address; `host`: that of each host in the job; 0.0.0.0: all"
    )
    display: Literal["auto", "rich", "plain", "quiet", "verbose"] = Field(
        default="auto", description="progress on the console; verbose: a line for every update"
    )

    @property
    def times_waits(self) -> bool:
        """Whether each rank measures how long it waits for others."""
        return self.trace == "traffic" or self.metrics_port is not None


class Spec(Section):
    """A whole spec: the complete description of a job, as far as no task, model or backend adds to it.

    The schema of a job is a subclass, which ``building`` makes from this one and the sections of the job's task.
    """

    task: ClassVar[str] = ""
    """The task whose sections the class has; empty: none."""

    model: ModelSpec = Field(default=ModelSpec(), description="the network, and the weights that it starts from")
    data: DataSpec = Field(default=DataSpec(), description="the data set, and how it is loaded")
    train: TrainSpec = Field(default=TrainSpec(), description="length, batch size, precision")
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="the rule that turns gradients into weights")
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="learning rate over the job")
    backend: BackendSpec = Field(default=BackendSpec(), description="the backend that trains")
    parallel: ParallelSpec = Field(
        default=ParallelSpec(), description="the mesh of ranks: replicas, shards, tensor groups, stages"
    )
    cluster: ClusterSpec = Field(default=ClusterSpec(), description="hosts, ranks and ports")
    launcher: LauncherSpec = Field(default=LauncherSpec(), description="what starts the ranks of one host")
    evaluate: EvaluateSpec = Field(default=EvaluateSpec(), description="when and how the evaluation split is scored")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="checkpoints: how often, how many")
    report: ReportSpec = Field(default=ReportSpec(), description="run folder, progress display, records")
    plugins: PathText | None = Field(
        default=None, description="a plugins.toml; null: the one beside the spec, else in the current folder"
    )
