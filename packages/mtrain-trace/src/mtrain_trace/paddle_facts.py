"""What is said once of a process that trains with Paddle, and what its optimizers hold and are set to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle

from mtrain_trace.paddle_arrays import MOMENTS

SAME_RULES = {"Momentum": "SGD"}
"""Optimizers of Paddle that step as one of torch does that has another name."""
BATCH_NORM = paddle.nn.layer.norm._BatchNormBase
DROPOUT = (paddle.nn.Dropout, paddle.nn.Dropout2D, paddle.nn.Dropout3D, paddle.nn.AlphaDropout)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that an optimizer treats alike: of one of its groups, with one rate and one decay."""

    number: int
    rate: float
    """Factor of the learning rate."""
    decay: tuple[str, float]
    """(kind, coefficient) of the weight decay."""
    parameters: list[Any]


def facts_of_paddle(roots: list[Any]) -> dict[str, Any]:
    """Return versions, flags, and what the models contain that depends on the batch or on random numbers."""
    parts = [part for root in roots for part in root.sublayers(include_self=True)]
    dtypes = {_dtype(p) for root in roots for p in root.parameters() if p.is_floating_point()}
    return {
        "framework": "paddle",
        "paddle": str(paddle.version.full_version),
        "device": str(paddle.device.get_device()),
        "models": [type(getattr(root, "_layers", root)).__name__ for root in roots],
        "model_dtypes": sorted(dtypes),
        "wrapped": sorted({type(root).__name__ for root in roots if hasattr(root, "_layers")}),
        "compiled": any(type(root.forward).__name__.endswith("StaticFunction") for root in roots),
        "batch_norms": sum(isinstance(part, BATCH_NORM) for part in parts),
        "dropouts": sum(isinstance(part, DROPOUT) and bool(part.p) for part in parts),
    }


def describe_optimizer(optimizer: Any, groups: list[list[str]]) -> dict[str, Any]:
    """Return what a trace says once of an optimizer, with the names of the arrays of each group."""
    rule, parameters = type(optimizer).__name__, list(_list_groups(optimizer))
    return {
        "rule": SAME_RULES.get(rule, rule),
        "groups": groups,
        "dtypes": sorted({_dtype(parameter) for _, parameter in parameters}),
        "sharded": shards() > 1,
        "unseen": _unseen(parameters),
    }


def _unseen(parameters: list[tuple[int, Any]]) -> list[str]:
    words = []
    if any(getattr(parameter, "is_distributed", False) for _, parameter in parameters):
        words.append(
            "parts of arrays that Fleet splits over a model-parallel group; those of rank 0 alone are compared"
        )
    if any(parameter.name.startswith("slice@") for _, parameter in parameters):
        words.append("slices of arrays that Fleet's sharding makes; they have names of their own")
    return words


def shards() -> int:
    """Return over how many ranks Fleet divides the arrays that are stepped; 1 where it divides none."""
    from paddle.distributed import fleet

    group = getattr(fleet.fleet, "_hcg", None)
    return int(group.get_sharding_parallel_world_size()) if group is not None else 1


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[-1]


def autocast_format() -> str | None:
    """Return the format that autocast computes in where this is called, such as ``bfloat16``; None where it is off."""
    tracer = paddle.base.framework._dygraph_tracer()
    return None if str(tracer._amp_level).endswith("O0") else str(tracer._amp_dtype)


def random_state() -> str:
    """Return a digest of the state of the random numbers; its text holds an address, which says nothing."""
    digest = hashlib.blake2b(digest_size=6)
    for state in paddle.get_rng_state():
        words = str(state).split()
        digest.update(" ".join([*words[1:3], *words[4:]]).encode())
    return digest.hexdigest()


def calls_of(optimizer: Any) -> int:
    """Return how many times a step applies the rule: once for each group that the script has made."""
    groups = optimizer._param_groups
    return len(groups) if groups and isinstance(groups[0], dict) else 1


def groups_of(optimizer: Any, left_out: set[int]) -> list[ParameterGroup]:
    """Return the parameters of an optimizer by what it treats alike; ``left_out``: identities that are none."""
    found: dict[tuple[int, float, tuple[str, float]], list[Any]] = {}
    for number, parameter in _list_groups(optimizer):
        if id(parameter) not in left_out:
            rate = float(getattr(parameter, "optimize_attr", {}).get("learning_rate", 1.0))
            found.setdefault((number, rate, _decay(optimizer, number, parameter)), []).append(parameter)
    return [ParameterGroup(*key, parameters) for key, parameters in found.items()]


def _list_groups(optimizer: Any) -> Iterator[tuple[int, Any]]:
    groups = optimizer._param_groups or optimizer._parameter_list or []
    for number, group in enumerate(groups):
        if isinstance(group, dict):
            for parameter in group["params"]:
                yield number, parameter
        else:
            yield 0, group


def _group_options(optimizer: Any, number: int) -> dict[str, Any]:
    groups = optimizer._param_groups or []
    return groups[number] if groups and isinstance(groups[0], dict) else {}


def _decay(optimizer: Any, number: int, parameter: Any) -> tuple[str, float]:
    """Return (kind, coefficient) of the weight decay of a parameter: ``weight_decay`` is that of torch's optimizers."""
    options = _group_options(optimizer, number)
    if hasattr(optimizer, "_apply_decay_param_fun"):  # AdamW, whose decay is no part of the gradient
        chosen = optimizer._apply_decay_param_fun
        value = options.get("weight_decay", getattr(optimizer, "_weight_decay", 0.0))
        return "weight_decay", 0.0 if chosen is not None and not chosen(parameter.name) else float(value or 0.0)
    rule = getattr(parameter, "regularizer", None) or options.get("weight_decay") or optimizer.regularization
    if rule is None:  # Momentum takes the decay over into its own operation
        inside = getattr(optimizer, "_regularization_method", "") == "l2_decay"
        return "weight_decay", float(optimizer._regularization_coeff) if inside else 0.0
    if isinstance(rule, (int, float)):
        return "weight_decay", float(rule)
    kind = "l1_decay" if type(rule).__name__.startswith("L1") else "weight_decay"
    return kind, float(getattr(rule, "_coeff", getattr(rule, "_regularization_coeff", math.nan)))


def options_of(optimizer: Any, group: ParameterGroup) -> dict[str, Any]:
    """Return the settings of a group under torch's names: learning rate, momentum, decay and the rest."""
    given = _group_options(optimizer, group.number)

    def value(name: str) -> Any:
        return given.get(name, getattr(optimizer, f"_{name}", None))

    options: dict[str, Any] = {"lr": float(optimizer.get_lr()) * group.rate, group.decay[0]: group.decay[1]}
    rule = type(optimizer).__name__
    if rule in ("SGD", "Momentum"):
        options["momentum"] = float(value("momentum") or 0.0)
        options["nesterov"] = bool(value("use_nesterov"))
    if isinstance(value("beta1"), (int, float)) and isinstance(value("beta2"), (int, float)):
        options["betas"] = [float(value("beta1")), float(value("beta2"))]
    for name, word in (("epsilon", "eps"), ("rho", "alpha"), ("amsgrad", "amsgrad"), ("centered", "centered")):
        if isinstance(value(name), (bool, int, float)):
            options[word] = value(name)
    return options


def master_of(optimizer: Any, parameter: Any) -> Any:
    """Return the float32 copy that an optimizer keeps of a narrower parameter; the parameter where it keeps none."""
    return getattr(optimizer, "_master_weights", {}).get(parameter.name, parameter)


def moments_of(optimizer: Any, parameter: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps for a parameter in its shape, under torch's names."""
    key = master_of(optimizer, parameter).name
    for name, values in optimizer._accumulators.items():
        value = values.get(key)
        if value is not None and list(value.shape) == list(parameter.shape) and name in MOMENTS:
            yield MOMENTS[name], value


def counts(optimizer: Any) -> bool:
    """Return whether an optimizer counts its steps, as torch's Adam does."""
    return hasattr(optimizer, "_beta1")


def steps_of(optimizer: Any, parameters: Iterable[Any]) -> int | None:
    """Return how many steps the moments of an optimizer have counted; None before the first one."""
    for parameter in parameters:
        power = optimizer._accumulators.get("beta1_pow_acc", {}).get(master_of(optimizer, parameter).name)
        if power is not None and counts(optimizer):
            left = float(power.astype("float64").numpy().reshape(-1)[0])
            # The power is that of the step to come. Those of very many steps are too small for float32.
            return round(math.log(left) / math.log(optimizer._beta1)) - 1 if left > 1e-30 else None
    return None
