"""Whether a checkpoint fits the model of a spec, and how large its own will be: asked by the starter, before any rank runs."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint.format import described, shapes_of
from mtrain.errors import CheckpointError
from mtrain.spec.model import Spec
from mtrain.weights.outline import SpecOutline

_SHOWN = 3
_MOMENTS = {"sgd": ("momentum",), "adam": ("mean", "square"), "adamw": ("mean", "square")}
"""``optimizer.rule`` -> the moments that a checkpoint holds for each trained parameter."""
Shape = tuple[int, ...]


def check_resume(spec: Spec, folder: Path, outline: SpecOutline, *, classes: int, training: bool) -> list[str]:
    """Compare the model and the optimizer of ``spec`` with those that the checkpoint ``folder`` was written by.

    Args:
        spec: of the job that is to start from the checkpoint.
        folder: an intact checkpoint.
        outline: the model of ``spec``.
        classes: number of classes of the job's data.
        training: whether the optimizer goes on too.

    Returns:
        Sentences about options that differ though the weights fit.

    Raises:
        CheckpointError: the ranks could not restore the checkpoint.
    """
    body = described(folder)
    saved = body.get("spec") or {}
    changes = _changes(spec, saved, names=(body.get("extra") or {}).get("class_names"), classes=classes)
    weights = shapes_of(folder, "weights")
    if changes or not saved:
        unfit = _unfit(_expected(outline), weights)
        if unfit:
            raise CheckpointError(
                f"{folder} does not fit this job: {'; '.join([*changes, unfit])}. Give the model, options and data that it "
                f"was trained with, or start a new job from its weights with model.weights: {folder}"
            )
    if training:
        _check_moments(spec, saved, folder, list(weights))
    return [f"resumed with a change: {change}" for change in changes]


def _changes(spec: Spec, saved: Mapping[str, Any], *, names: Sequence[str] | None, classes: int) -> list[str]:
    """What of the model differs from the run of the checkpoint, one part of a sentence each.

    ``names``: classes of that run; ``classes``: how many the data of this job has.
    """
    model: Mapping[str, Any] = saved.get("model") or {}
    told = []
    if model.get("name", spec.model.name) != spec.model.name:
        told.append(f"model.name: {spec.model.name} given, the checkpoint was trained with {model['name']}")
    now, then = spec.model.model_dump(mode="json")["options"], model.get("options") or {}
    told += [
        f"model.options.{name}: {_said(now, name)} given, the checkpoint was trained with {_said(then, name)}"
        for name in sorted({*now, *then})
        if now.get(name) != then.get(name)
    ]
    size = (saved.get("data") or {}).get("image_size", spec.data.image_size)
    if size != spec.data.image_size:
        told.append(f"data.image_size: {spec.data.image_size} given, the checkpoint was trained with {size}")
    if names is not None and len(names) != classes:
        told.append(f"{classes} classes in the data, the checkpoint was trained with {len(names)}")
    return told


def _said(options: Mapping[str, Any], name: str) -> str:
    return str(options[name]) if name in options else "nothing"


def checkpoint_bytes(spec: Spec, outline: SpecOutline) -> int | None:
    """About the size of a checkpoint of ``spec``; None: the model cannot be outlined without its framework."""
    if outline.state is None:
        return None
    wide = 2 if spec.train.precision == "fp64" else 1
    weights = sum(math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in outline.state.values())
    return weights * wide * (1 + (spec.train.ema is not None) + len(_MOMENTS[spec.optimizer.rule]))


def _expected(outline: SpecOutline) -> Mapping[str, Shape] | None:
    """Names and shapes of a model; None: it cannot be outlined, and its ranks will compare."""
    return None if outline.state is None else {name: entry.shape for name, entry in outline.state.items()}


def _unfit(expected: Mapping[str, Shape] | None, held: Mapping[str, Shape]) -> str:
    """What differs between a model and the arrays of a checkpoint, in words; empty: nothing."""
    if expected is None:
        return ""
    kinds = {
        "missing": [name for name in expected if name not in held],
        "unknown": [name for name in held if name not in expected],
        "of another shape": [
            f"{name} {held[name]}, expected {shape}"
            for name, shape in expected.items()
            if held.get(name, shape) != shape
        ],
    }
    told = [f"{len(names)} {kind} ({', '.join(names[:_SHOWN])})" for kind, names in kinds.items() if names]
    return f"of {len(held)} saved arrays and {len(expected)} of the model, {', '.join(told)}" if told else ""


def _check_moments(spec: Spec, saved: Mapping[str, Any], folder: Path, weights: list[str]) -> None:
    """Refuse an optimizer whose moments are others than those of the checkpoint.

    Raises:
        CheckpointError: another rule, or other parameters are trained.
    """
    moments = shapes_of(folder, "moments")
    if not moments:
        return
    remedy = f"or start a new job from its weights with model.weights: {folder}"
    held = sorted({name.partition("/")[0] for name in moments})
    if held != sorted(_MOMENTS[spec.optimizer.rule]):
        raise CheckpointError(
            f"optimizer.rule: {spec.optimizer.rule} given, but {folder} holds the moments of another rule "
            f"({', '.join(held)}); go on with the rule it was trained with, {remedy}"
        )
    before = (saved.get("train") or {}).get("freeze", spec.train.freeze)
    if _frozen(weights, spec.train.freeze) != _frozen(weights, before):
        raise CheckpointError(
            f"train.freeze: {list(spec.train.freeze)} given, but {folder} was trained with {list(before)} and holds no "
            f"moments for other parameters; go on with that, {remedy}"
        )


def _frozen(names: list[str], patterns: list[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
