"""Listen to DeepSpeed's engine: its losses, its clipping, and the flat partitions that its optimizers step.

ZeRO steps a plain torch optimizer on flat arrays of float32, of which each rank holds a stretch. Their gradients at that
moment are exchanged, unscaled and clipped: what the update uses. Where the stretches of each named array lie is read from
the tables that ZeRO itself keeps, so nothing is gathered and no collective call is added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from mtrain_trace import torch_arrays, wrapping
from mtrain_trace.torch_arrays import Holding, Segment
from mtrain_trace.torch_hooks import attempt
from mtrain_trace.torch_listener import TorchListener

FLAT_GROUPS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes of the optimizers of ZeRO 1 and 2, and of bfloat16 without ZeRO, with the flat array of each group."""


def install(listener: TorchListener, module: ModuleType) -> None:
    """Wrap backward and step of the engine; ``module`` is ``deepspeed.runtime.engine``."""
    engine = module.DeepSpeedEngine
    _wrap_making(listener, engine)
    _wrap_backward(listener, engine)
    _wrap_step(listener, engine)
    # The clipping of an engine without ZeRO, by DeepSpeed's own function.
    wrapping.wrap(
        attempt,
        module,
        "clip_grad_norm_",
        after=lambda _, keywords, norm: listener.see_clip(norm, keywords.get("max_norm", 0.0)),
    )


def _wrap_making(listener: TorchListener, engine: Any) -> None:
    """Ignore the steps of an engine that is being made: on gradients of zero, so that the moments get their memory."""
    original = engine.__init__

    @functools.wraps(original)
    def make(*arguments: Any, **keywords: Any) -> None:
        listener.is_paused = True
        try:
            original(*arguments, **keywords)
        finally:
            listener.is_paused = False

    engine.__init__ = make


def _wrap_backward(listener: TorchListener, engine: Any) -> None:
    original = engine.backward

    @functools.wraps(original)
    def backward(self: Any, loss: Any, *arguments: Any, **keywords: Any) -> Any:
        # The engine divides by the micro batches of an update, then multiplies by its loss scale, which is no loss.
        divides = keywords.get("scale_wrt_gas", True)
        listener.divisor = float(self.gradient_accumulation_steps()) if divides else 1.0
        attempt(listener.see_backward, loss)
        listener.divisor = None
        try:
            return original(self, loss, *arguments, **keywords)
        finally:
            listener.divisor = 1.0

    engine.backward = backward


def _wrap_step(listener: TorchListener, engine: Any) -> None:
    original = engine._take_model_step

    @functools.wraps(original)
    def take_step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        attempt(_begin, listener, self)
        try:
            return original(self, *arguments, **keywords)
        finally:
            attempt(_end, listener, self)

    engine._take_model_step = take_step


def _begin(listener: TorchListener, engine: Any) -> None:
    """Open an update of the optimizer within the engine's; an engine whose optimizer is torch's own needs none of it."""
    inner = getattr(engine.optimizer, "optimizer", None)
    if inner is None or not isinstance(inner, torch.optim.Optimizer):
        return
    if not listener.is_watched(inner):
        holding = _holding(engine)
        if holding is None:
            return
        listener.watch(inner, holding)
    listener.engine_steps = True
    listener.begin_update(inner)


def _end(listener: TorchListener, engine: Any) -> None:
    """Close the update, with the norm and the limit by which the engine has clipped."""
    if not listener.engine_steps:
        return
    listener.engine_steps = False
    norm, limit = getattr(engine.optimizer, "_global_grad_norm", None), float(engine.gradient_clipping())
    if limit > 0 and norm is not None:
        listener.see_clip(norm, limit)
    listener.end_update(engine.optimizer.optimizer)


def _holding(engine: Any) -> Holding | None:
    """Return what the optimizer inside of an engine holds; None for one whose tables are not known."""
    optimizer, named = engine.optimizer, list(torch_arrays.names_of(engine.module))
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if hasattr(optimizer, "grad_position"):
        flats, placed = list(optimizer.fp32_partitioned_groups_flat), list(_placed_of_stage_3(optimizer, named))
    elif any(hasattr(parameter, "_hp_mapping") for _, parameter in named):
        flats = next(list(getattr(optimizer, key)) for key in FLAT_GROUPS if hasattr(optimizer, key))
        placed = list(_place_by_mapping(named))
    elif hasattr(optimizer, "fp32_groups_flat"):
        flats, placed = list(optimizer.fp32_groups_flat), list(_place_in_copies(optimizer, named))
    elif hasattr(optimizer, "fp32_groups"):
        return _holding_of_copies(optimizer, named)
    else:
        return None
    segments: dict[int, list[Segment]] = {id(flat): [] for flat in flats}
    for number, segment in placed:
        segments[id(flats[number])].append(segment)
    # Without ZeRO each rank holds whole copies, which are not added up.
    sharded = not hasattr(optimizer, "fp32_groups_flat")
    groups = _groups(optimizer, named)
    return Holding(flats, segments=segments, groups=groups, shapes=_shapes(named), sharded=sharded)


def _holding_of_copies(optimizer: Any, named: list[tuple[str, Any]]) -> Holding:
    """Return what an optimizer of float16 or bfloat16 without ZeRO holds: a copy in float32 of each array."""
    names, copies = {id(parameter): name for name, parameter in named}, {}
    for narrow, wide in zip(optimizer.fp16_groups, optimizer.fp32_groups):
        copies.update({id(copy): names[id(parameter)] for parameter, copy in zip(narrow, wide)})
    parameters = [copy for group in optimizer.fp32_groups for copy in group]
    return Holding(parameters, copies, groups=_groups(optimizer, named), shapes=_shapes(named))


def _shapes(named: list[tuple[str, Any]]) -> dict[str, list[int]]:
    return {name: list(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named}


Placed = Iterator[tuple[int, Segment]]
"""(number of the flat array, part of a named array in it)."""


def _placed_of_stage_3(optimizer: Any, named: list[tuple[str, Any]]) -> Placed:
    for name, parameter in named:
        group, begin, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = torch.distributed.get_rank(getattr(parameter, "ds_process_group", None)) * size
        count = min(size, parameter.ds_numel - start)  # the last part is filled up with zeros
        if count > 0:
            yield group, Segment(name, begin, count, start)


def _place_by_mapping(named: list[tuple[str, Any]]) -> Placed:
    for name, parameter in named:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            flat, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield mapping.param_group_index, Segment(name, flat.start, flat.numel, whole.start)


def _place_in_copies(optimizer: Any, named: list[tuple[str, Any]]) -> Placed:
    names = {id(parameter): name for name, parameter in named}
    for number, group in enumerate(optimizer.fp16_groups):
        begin = 0
        for parameter in group:
            yield number, Segment(names[id(parameter)], begin, parameter.numel(), 0)
            begin += parameter.numel()


def _groups(optimizer: Any, named: list[tuple[str, Any]]) -> list[list[str]]:
    """Return the names of the arrays of each parameter group."""
    names = {id(parameter): name for name, parameter in named}
    held = getattr(optimizer, "bit16_groups", None) or optimizer.fp16_groups
    # Stage 3 divides the groups of the script into parts of limited size.
    which = getattr(optimizer, "sub_group_to_group_id", None) or {}
    groups: dict[int, list[str]] = {}
    for number, parameters in enumerate(held):
        found = groups.setdefault(which.get(number, number), [])
        found += [names[id(parameter)] for parameter in parameters if id(parameter) in names]
    return [groups[number] for number in sorted(groups)]
