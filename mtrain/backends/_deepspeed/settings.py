"""Write DeepSpeed's JSON configuration with every key set, so that no default of DeepSpeed's applies.

Importing this module imports no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.core.interfaces import Recipe
from mtrain.spec.suggest import hint

MIB = 1 << 20
Stage = Literal[0, 1, 2, 3]
Json = Mapping[str, Any]

OWNED = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.max_micro_batch",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_clipping": "train.clip_norm",
    "fp16": "train.precision: fp16",
    "bf16": "train.precision: bf16",
    "torch_autocast": "train.precision",
    "data_types": "train.precision",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "prescale_gradients": "nothing: gradients are always averaged",
    "gradient_predivide_factor": "nothing: gradients are always averaged",
    "gradient_allreduce_op": "nothing: gradients are always averaged",
    "zero_allow_untested_optimizer": "nothing: it is set",
    "zero_force_ds_cpu_optimizer": "nothing: it is set",
    "managed_gradient_accumulation": "train.accumulate",
    "checkpoint": "checkpoint",
    "tensorboard": "report.tensorboard",
    "compile": "train.compile",
}
"""Maps a key of DeepSpeed's JSON that mtrain writes itself to the key of the spec that decides it."""
OWNED_ZERO = {
    "stage": "backend.options.stage",
    "offload_optimizer": "backend.options.offload",
    "cpu_offload": "backend.options.offload",
    "reduce_bucket_size": "backend.options.bucket_mb",
    "allgather_bucket_size": "backend.options.bucket_mb",
    "compute_grad_norm": "nothing: the norm is mtrain's",
    "ignore_unused_parameters": "nothing: it is set",
}
"""Maps keys of DeepSpeed's ``zero_optimization`` to keys of the spec, like ``OWNED``."""
OPEN = (
    "communication_data_type",
    "comms_logger",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_optimization",
)
"""Keys that ``backend.options.config`` may hold."""
OPEN_ZERO = (
    "contiguous_gradients",
    "enable_sanity_checks",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)
"""Keys that ``backend.options.config.zero_optimization`` may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Options that decide how a job is split over ranks."""

    stage: Stage
    offload: bool
    bucket_mb: float
    reduction: Literal["update", "micro_batch"]
    extra: Json = field(default_factory=dict)


def check_extra(config: Json) -> None:
    """Refuse keys that another part of the spec decides, and keys that DeepSpeed would silently ignore.

    Raises:
        ValueError: At least one key is refused; the message has one clause per key.
    """
    problems = _refusals(config, OPEN, OWNED, prefix="")
    inner = config.get("zero_optimization", {})
    if isinstance(inner, Mapping):
        problems += _refusals(inner, OPEN_ZERO, OWNED_ZERO, prefix="zero_optimization.")
    else:
        problems.append(f"zero_optimization: given {inner!r}, expected a mapping")
    if problems:
        raise ValueError("; ".join(problems))


def _refusals(config: Json, allowed: tuple[str, ...], owned: Mapping[str, str], *, prefix: str) -> list[str]:
    """Return one message for each key of ``config`` that is not allowed."""
    return [
        f"{prefix}{key}: mtrain writes this key; use {owned[key]}"
        if key in owned
        else f"{prefix}{key}: no key that DeepSpeed takes here{hint(key, allowed)}"
        for key in config
        if key not in allowed
    ]


def settings(recipe: Recipe, sharding: Sharding, *, size: int, pin_memory: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a job of ``size`` ranks.

    The engine itself does mixed precision (autocast over float32 weights, as in all backends on torch), accumulation,
    clipping and learning rates. DeepSpeed is configured for one batch per update, no clipping and float32.
    """
    extra = dict(sharding.extra)
    zero = {**_zero(recipe, sharding, pin_memory=pin_memory), **extra.pop("zero_optimization", {})}
    return {
        "train_batch_size": recipe.micro_batch * size,
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": True,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "mean",
        # Gradients are divided before they are summed, as in ddp. From stage 1 on DeepSpeed always does that, and
        # refuses this key.
        "prescale_gradients": sharding.stage == 0,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_python_gc": False,
        **extra,
        "zero_optimization": zero,
    }


def _zero(recipe: Recipe, sharding: Sharding, *, pin_memory: bool) -> dict[str, Any]:
    bucket = max(int(sharding.bucket_mb * MIB / 4), 1)
    return {
        "stage": sharding.stage,
        "contiguous_gradients": True,
        # DeepSpeed's reduce-scatter does not support float64.
        "reduce_scatter": recipe.precision != "fp64",
        "reduce_bucket_size": bucket,
        # DeepSpeed requires a multiple of two.
        "allgather_bucket_size": bucket + bucket % 2,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "overlap_comm": False,
        "compute_grad_norm": sharding.stage not in (1, 2) or sharding.offload,
        "offload_optimizer": {"device": "cpu", "pin_memory": pin_memory} if sharding.offload else {"device": "none"},
        "offload_param": {"device": "none"},
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "elastic_checkpoint": False,
        "ignore_unused_parameters": True,
        "memory_efficient_linear": False,
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
    }
