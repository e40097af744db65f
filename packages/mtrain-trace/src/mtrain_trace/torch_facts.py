"""What is said once of a process that trains with torch, and the settings of its optimizers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

EXECUTION_ONLY = ("foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Options of optimizers that say how a step is computed, not which."""
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
DROPOUT = torch.nn.modules.dropout._DropoutNd


def facts_of_torch(roots: list[Any]) -> dict[str, Any]:
    """Return versions, flags, and what the models contain that depends on the batch or on random numbers."""
    dynamo = sys.modules.get("torch._dynamo")
    compiled = dynamo is not None and any(type(root).__name__ == "OptimizedModule" for root in roots)
    dtypes = {str(p.dtype).split(".")[-1] for root in roots for p in root.parameters() if p.is_floating_point()}
    parts = [part for root in roots for part in root.modules()]
    # FSDP2 has no wrapper: its settings are found in the state that it attaches to modules.
    states = [part._get_fsdp_state() for part in parts if hasattr(part, "_get_fsdp_state")]
    casts = {getattr(getattr(state, "_mp_policy", None), "param_dtype", None) for state in states} - {None}
    return {
        "framework": "torch",
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "models": [_class_name(root) for root in roots],
        "model_dtypes": sorted(dtypes),
        "fsdp_dtypes": sorted(str(dtype).split(".")[-1] for dtype in casts),
        "wrapped": sorted({type(root).__name__ for root in roots if hasattr(root, "module")}),
        "compiled": compiled,
        "batch_norms": sum(isinstance(part, BATCH_NORM) for part in parts),
        "dropout_rates": sorted({part.p for part in parts if isinstance(part, DROPOUT) and part.p > 0}),
        "dropouts": sum(isinstance(part, DROPOUT) and part.p > 0 for part in parts),
    }


def _class_name(root: Any) -> str:
    inner = getattr(root, "module", None) or getattr(root, "_orig_mod", None)
    return type(inner if isinstance(inner, torch.nn.Module) else root).__name__


def unseen(optimizer: Any, roots: list[Any]) -> list[str]:
    """Return in words what of this training cannot be seen."""
    words = []
    if any(type(root).__name__ == "PipelineEngine" for root in roots):
        words.append("DeepSpeed's pipelines: the stages of other ranks, and the losses of their micro batches")
    if any(group.get("capturable") for group in optimizer.param_groups):
        words.append("CUDA graphs: steps that are replayed call no hook")
    if any(getattr(parameter, "is_meta", False) for group in optimizer.param_groups for parameter in group["params"]):
        words.append("weights that lie on no device (meta tensors)")
    return words


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: learning rate, momentum, decay and all else that JSON can hold."""
    options = {}
    for key, value in group.items():
        # Reading a rate on a device would wait for it at every update.
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, (tuple, list)) and all(isinstance(part, (bool, int, float)) for part in value):
            value = list(value)
        elif not isinstance(value, (bool, int, float, str, type(None))):
            continue
        if key != "params" and key not in EXECUTION_ONLY:
            options[key] = value
    return options


def autocast_format() -> str | None:
    """Return the format that autocast computes in where this is called, such as ``bfloat16``; None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # since torch 2.4, where the older functions warn
        formats = [torch.get_autocast_dtype(device) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    else:
        formats = [torch.get_autocast_gpu_dtype()] if torch.is_autocast_enabled() else []
        formats += [torch.get_autocast_cpu_dtype()] if torch.is_autocast_cpu_enabled() else []
    return str(formats[0]).split(".")[-1] if formats else None


def is_recomputing() -> bool:
    """Return whether a backward pass is running: modules that are called then repeat a forward pass that was seen."""
    return torch._C._current_graph_task_id() != -1


def steps_of(optimizer: Any, parameters: Iterable[Any]) -> int | None:
    """Return how many steps the first parameter's state has counted; None where there is no state, or it is on a device."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {}) if hasattr(optimizer, "state") else {}
        steps = state.get("step") if isinstance(state, dict) else None
        if isinstance(steps, torch.Tensor):
            steps = int(steps.item()) if steps.device.type == "cpu" else None
        if steps is not None:
            return int(steps)
        if state:
            return None
    return None
