"""Translate Accelerate's ``default_config.yaml`` and DeepSpeed's JSON, which say where and how a script runs."""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, ClassVar

from pydantic import ValidationError

from mtrain.errors import SpecError
from mtrain.spec.importers.documents import Document, read
from mtrain.spec.importers.importer import Importer
from mtrain.spec.importers.key_report import Book, equal, is_number
from mtrain.spec.registry import Registry
from mtrain.spec.sources import nest
from mtrain.spec.yaml_reader import Path

BACKENDS: Mapping[str, str] = {
    "NO": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "DEEPSPEED": "deepspeed",
    "FSDP": "fsdp",
}
"""Backend by Accelerate's ``distributed_type``."""
PRECISIONS: Mapping[str, str] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
RULES: Mapping[str, str] = {"Adam": "adam", "AdamW": "adamw", "SGD": "sgd", "Lion": "lion", "Lamb": "lamb"}
SCHEDULES: Mapping[str, str] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_USUAL: Mapping[str, Any] = {
    "debug": False,
    "downcast_bf16": "no",
    "same_network": True,
    "main_training_function": "main",
}
"""Values of Accelerate's further keys with which it does as mtrain always does."""
_AUTO = "the spec or the script says it, as with `auto`"
_ADVICE = (
    "a file that says where a script runs, and not what is trained: mtrain run --accelerate-config {file} train.py"
)


class _Launching(Importer):
    of_scripts = True
    keys: ClassVar[Sequence[str]]

    def recognises(self, documents: Sequence[Document]) -> bool:
        """Return whether a file has keys of its project."""
        return any(key in document.values for document in documents for key in self.keys)

    def lacking(self, document: Document) -> str:
        """See ``Importer.lacking``: no data and no model."""
        return _ADVICE.format(file=document.name)

    def translate(self, documents: Sequence[Document], *, cards: int | None) -> Sequence[Book]:
        """Translate one file."""
        if len(documents) > 1 or cards is not None:
            raise SpecError(
                f"{documents[0].name}: import it alone, and without --cards; it says how many processes run"
            )
        book = Book(documents[0])
        books = [book, *self._translate(book)]
        book.note(
            "a script that makes an Accelerator of its own, or calls deepspeed.initialize, has its ranks from here, and the rest "
            "from itself"
        )
        for each in books:
            each.close()
        return books

    @abstractmethod
    def _translate(self, book: Book) -> Sequence[Book]:
        """Enter the keys of a file, and return the books of the files that it names."""


class DeepSpeed(_Launching):
    """DeepSpeed's JSON; a value ``auto`` is left to the spec or the script."""

    expected: ClassVar[str] = "DeepSpeed's JSON (`zero_optimization`)"
    keys = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")

    def _translate(self, book: Book) -> Sequence[Book]:
        translate_deepspeed(book)
        return ()


class Accelerate(_Launching):
    """Accelerate's YAML, and the JSON of DeepSpeed that it may name."""

    expected: ClassVar[str] = "Accelerate's YAML (`distributed_type`)"
    keys = ("distributed_type", "compute_environment")

    def _translate(self, book: Book) -> Sequence[Book]:
        kind = str(book.get("distributed_type", "NO"))
        if kind not in BACKENDS:
            raise book.refuse("distributed_type", f"expected one of {', '.join(BACKENDS)}")
        if book.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise book.refuse(
                "compute_environment", "expected LOCAL_MACHINE; a scheduler is a cluster of mtrain: mtrain submit"
            )
        book.same("compute_environment", "this machine, or the hosts of --ips")
        book.carry("distributed_type", "backend.name", BACKENDS[kind])
        _processes(book)
        _carry(
            book,
            "mixed_precision",
            "train.precision",
            lambda value: PRECISIONS.get(str(value)),
            f"one of {', '.join(PRECISIONS)}",
        )
        _carry(book, "gradient_accumulation_steps", "train.accumulate")
        if book.truth("use_cpu", default=False) or kind == "MULTI_CPU":
            book.put("backend.options.device", "cpu", "use_cpu" if book.has("use_cpu") else "distributed_type")
        book.same("use_cpu", "backend.options.device")
        dynamo = str(book.get("dynamo_config.dynamo_backend", "NO")).upper()
        if dynamo != "NO":
            book.put("train.compile", value=True, source="dynamo_config.dynamo_backend")
        book.same("dynamo_config.dynamo_backend", "train.compile")
        for key, value in _USUAL.items():
            if equal(book.get(key), value):
                book.same(key, "as always in mtrain")
        _parallelism(book)
        if kind == "FSDP":
            _fsdp(book)
        return _deepspeed_plugin(book) if kind == "DEEPSPEED" else ()


def _carry(
    book: Book, source: str, target: str, change: Callable[[Any], Any] = lambda value: value, expected: str = ""
) -> None:
    """Carry a key over unless it is ``auto`` or null; ``change`` returns None for a value that has no counterpart."""
    value = book.get(source)
    if value in ("auto", None):
        book.same(source, _AUTO)
        return
    changed = change(value)
    if changed is None:
        raise book.refuse(source, f"expected {expected}")
    book.carry(source, target, changed)


def _processes(book: Book) -> None:
    machines, processes = book.integer("num_machines", 1), book.integer("num_processes", -1)
    if machines < 1 or (processes > 0 and processes % machines):
        raise book.refuse("num_processes", f"expected as many processes on each of {machines} machines")
    if processes > 0:
        book.carry("num_processes", "cluster.nproc_per_node", processes // machines, remark="on each machine")
    book.same("num_processes", "one for each device")
    if machines > 1:
        book.carry("num_machines", "cluster.nodes")
        _carry(book, "machine_rank", "cluster.node_rank")
        _carry(book, "main_process_ip", "cluster.master_addr")
    for key in ("num_machines", "machine_rank", "main_process_ip"):
        book.same(key, "this machine alone")
    _carry(book, "main_process_port", "cluster.master_port", lambda port: port or "auto")
    numbers = str(book.get("gpu_ids", "all"))
    if re.fullmatch(r"\d+( *, *\d+)*", numbers):
        book.carry("gpu_ids", "cluster.devices", [int(number) for number in numbers.split(",")])
    if numbers in ("all", "None"):
        book.same("gpu_ids", "all of them")


def _parallelism(book: Book) -> None:
    for name, key in (("dp_replicate", "replicate"), ("dp_shard", "shard"), ("tp", "tensor")):
        source = f"parallelism_config.parallelism_config_{name}_size"
        if book.integer(source, 1) > 1:
            book.carry(source, f"parallel.{key}")
        book.same(source, "one, as without a mesh")


def _fsdp(book: Book) -> None:
    source = "fsdp_config."
    if book.get(source + "fsdp_sharding_strategy") == "NO_SHARD":
        raise book.refuse(
            source + "fsdp_sharding_strategy",
            "expected a strategy that shards; without one distributed_type is MULTI_GPU",
        )
    book.same(source + "fsdp_sharding_strategy", "backend.name: fsdp")
    unit = {"TRANSFORMER_BASED_WRAP": "blocks", "NO_WRAP": "model"}.get(str(book.get(source + "fsdp_auto_wrap_policy")))
    if unit is not None:
        book.carry(source + "fsdp_auto_wrap_policy", "backend.options.unit", unit)
    if book.truth(source + "fsdp_activation_checkpointing", default=False):
        book.carry(source + "fsdp_activation_checkpointing", "train.recompute")
    for key in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
        if equal(book.get(source + key), other=False):
            book.same(source + key, "off, as always unless it is asked for")
    book.drop(source + "fsdp_offload_params", "backend fsdp keeps parameters on the devices")
    book.drop(source + "fsdp_state_dict_type", "checkpoints hold whole arrays, which any backend reads")


def _deepspeed_plugin(book: Book) -> Sequence[Book]:
    """Enter Accelerate's own keys of DeepSpeed, or those of the JSON that it names, whose book is returned."""
    named = book.get("deepspeed_config.deepspeed_config_file")
    if named is not None:
        beside = book.document.path.parent / str(named)
        inner = Book(read(beside if beside.is_file() else FilePath(str(named))))
        translate_deepspeed(inner)
        book.same("deepspeed_config.deepspeed_config_file", f"read: {inner.document.name}")
        return (inner,)
    source = "deepspeed_config."
    _stage(book, source + "zero_stage", default=2)
    _carry(book, source + "gradient_accumulation_steps", "train.accumulate")
    _carry(book, source + "gradient_clipping", "train.clip_norm")
    _offload(book, source + "offload_optimizer_device")
    if book.get(source + "offload_param_device") in ("none", None):
        book.same(source + "offload_param_device", "none, as always in mtrain")
    book.drop(source + "offload_param_device", "backend deepspeed keeps parameters on the devices")
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        book.drop(source + key, "mtrain builds models and writes checkpoints its own way")
    return ()


def _stage(book: Book, source: str, *, default: int) -> None:
    book.settle(source, "backend.options.stage", book.integer(source, default))


def _offload(book: Book, source: str) -> None:
    if book.get(source) == "cpu":
        book.carry(source, "backend.options.offload", value=True)
    elif book.get(source) in ("none", None):
        book.same(source, "backend.options.offload: false")
    book.drop(source, "mtrain offloads to the host's memory")


def translate_deepspeed(book: Book) -> None:
    """Enter the keys of DeepSpeed's JSON.

    Raises: ``SpecError`` for a value that has no counterpart and would train otherwise.
    """
    for section in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler"):
        book.section(section)  # refuses a value that is none
    book.assume("backend.name", "deepspeed", f"{book.document.name} is DeepSpeed's")
    _carry(book, "train_batch_size", "train.batch_size")
    _carry(book, "train_micro_batch_size_per_gpu", "train.max_micro_batch")
    _carry(book, "gradient_accumulation_steps", "train.accumulate")
    if "train.max_micro_batch" in book.values and "train.batch_size" not in book.values:
        book.note("train.batch_size: not stated; DeepSpeed's is the micro batch times accumulation times ranks")
    _carry(book, "gradient_clipping", "train.clip_norm")
    if book.get("gradient_clipping") in (0, 0.0):
        book.put("train.clip_norm", None, "gradient_clipping")
    _precision(book)
    _stage(book, "zero_optimization.stage", default=0)
    _offload(book, "zero_optimization.offload_optimizer.device")
    book.drop("zero_optimization.offload_optimizer", "mtrain decides how it offloads")
    if book.get("zero_optimization.offload_param.device") == "none":
        book.same("zero_optimization.offload_param", "none, as always in mtrain")
    book.drop("zero_optimization.offload_param", "backend deepspeed keeps parameters on the devices")
    _optimizer(book)
    _scheduler(book)
    options = Registry.read().load("backends", "deepspeed").Options
    for path in book.find_left():
        _further(book, path, options)


def _further(book: Book, path: Path, options: Any) -> None:
    """Enter a key that mtrain may pass on; the backend's own options say which ones change no training."""
    value = book.get(path)
    if value == "auto":
        book.drop(path, "DeepSpeed's own default stands")
        return
    key = ".".join(map(str, path))
    try:
        options(config=nest({key: value}))
    except ValidationError as error:
        book.drop(path, error.errors()[0]["msg"].removeprefix("Value error, "))
        return
    book.carry(path, f"backend.options.config.{key}")


def _precision(book: Book) -> None:
    enabled = {name: book.get((name, "enabled")) for name in ("bf16", "fp16")}
    if list(enabled.values()) == [True, True]:
        raise book.refuse("fp16.enabled", "but bf16 is enabled too; keep one")
    for name, value in enabled.items():
        if value is True:
            book.carry((name, "enabled"), "train.precision", name)
        book.same((name, "enabled"), _AUTO if value == "auto" else "off")
        book.drop(name, "the scale of the loss is mtrain's")
    if not any(enabled.values()):
        book.assume("train.precision", "fp32", "neither bf16 nor fp16 is enabled")


def _optimizer(book: Book) -> None:
    if not book.has("optimizer"):
        return
    parameters = "optimizer.params."
    _carry(book, "optimizer.type", "optimizer.rule", lambda kind: RULES.get(str(kind)), f"one of {', '.join(RULES)}")
    _carry(book, parameters + "lr", "optimizer.learning_rate")
    for key in ("eps", "weight_decay", "momentum"):
        _carry(book, parameters + key, f"optimizer.{key}")
    betas = book.get(parameters + "betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(is_number, betas)):
        book.put("optimizer.beta2", betas[1], parameters + "betas")
        book.carry(parameters + "betas", "optimizer.momentum", betas[0], remark=f"and optimizer.beta2: {betas[1]}")
    elif betas == "auto":
        book.same(parameters + "betas", _AUTO)
    book.drop("optimizer")
    book.assume("optimizer.groups", [{"match": ""}], "DeepSpeed decays every parameter")


def _scheduler(book: Book) -> None:
    if not book.has("scheduler"):
        return
    parameters = "scheduler.params."
    _carry(
        book, "scheduler.type", "schedule.name", lambda kind: SCHEDULES.get(str(kind)), f"one of {', '.join(SCHEDULES)}"
    )
    _carry(book, parameters + "cos_min_ratio", "schedule.final_factor")
    end = 0.0001 if book.get("scheduler.type") == "WarmupCosineLR" else 0.0
    book.otherwise("schedule.final_factor", end, "where DeepSpeed's schedule ends")
    book.assume("schedule.per", "update", "DeepSpeed changes it at every update")
    _carry(book, parameters + "warmup_num_steps", "schedule.warmup.updates")
    _carry(book, parameters + "warmup_min_lr", "schedule.warmup.learning_rate_from")
    _carry(book, parameters + "warmup_max_lr", "optimizer.learning_rate")
    _carry(book, parameters + "total_num_steps", "train.updates")
    if "schedule.warmup.updates" in book.values:
        book.assume("schedule.warmup.momentum_from", None, "DeepSpeed warms up the learning rate alone")
        book.assume("schedule.warmup.before_curve", value=True, why="DeepSpeed's curves begin after the warm-up")
        if book.get(parameters + "warmup_type", "log") == "log":
            book.note("schedule.warmup: rises by a line; DeepSpeed's warmup_type is log unless it says linear")
        book.same(parameters + "warmup_type", "schedule.warmup: linear")
    book.drop("scheduler")
