"""Check that a checkpoint fits a spec, and estimate the size of the spec's checkpoints, before any rank starts."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint.format import read_description, shapes_of
from mtrain.core.update.recipe import MOMENTS
from mtrain.errors import CheckpointError, first_few
from mtrain.spec.model import Spec
from mtrain.weights.outline import SpecOutline

_SHOWN = 3


def check_resume(
    spec: Spec, folder: Path, outline: SpecOutline, *, classes: Sequence[str], training: bool
) -> list[str]:
    """Compare the model and the optimizer of ``spec`` with those that wrote the checkpoint ``folder``.

    Args:
        spec: Spec of the job that is to start from the checkpoint.
        folder: An intact checkpoint.
        outline: The model of ``spec``.
        classes: Names of the classes of the job's data, in label order; empty: not known here.
        training: Whether the optimizer is restored too.

    Returns:
        Sentences about options that differ although the weights fit.

    Raises:
        CheckpointError: The ranks could not restore the checkpoint.
    """
    body = read_description(folder)
    saved = body.get("spec") or {}
    names = (body.get("extra") or {}).get("class_names")
    changes = _changes(spec, saved, names=names, classes=len(classes))
    weights = shapes_of(folder, "weights")
    if (changes or not saved) and (unfit := _unfit(outline, weights)):
        raise CheckpointError(
            f"{folder} does not fit this job: {'; '.join([*changes, unfit])}. Give the model, options and data that it "
            f"was trained with, or start a new job from its weights with model.weights: {folder}"
        )
    # Other classes of the same number would fit every array, and each label would mean something else.
    if names is not None and classes and list(names) != list(classes):
        places = [place for place, (then, now) in enumerate(zip(names, classes, strict=False)) if then != now]
        first = f"; label {places[0]} is {classes[places[0]]!r} here, {names[places[0]]!r} there" if places else ""
        raise CheckpointError(
            f"{folder} was trained on other classes than the data of this job have: {first_few(names, _SHOWN)} there, "
            f"{first_few(classes, _SHOWN)} here{first}. data.classes chooses, renames and orders classes; or start a "
            f"new job from its weights with model.weights: {folder}"
        )
    if training:
        _check_moments(spec, saved, folder, list(weights))
    return [f"resumed with a change: {change}" for change in changes]


def _changes(spec: Spec, saved: Mapping[str, Any], *, names: Sequence[str] | None, classes: int) -> list[str]:
    """Return one clause for each difference between the spec's model and that of the checkpoint's run.

    Args:
        spec: Spec of the job.
        saved: Spec of the checkpoint's run.
        names: Class names of the checkpoint's run.
        classes: Number of classes of the job's data.
    """
    model: Mapping[str, Any] = saved.get("model") or {}
    differences = []
    if model.get("name", spec.model.name) != spec.model.name:
        differences.append(f"model.name: {spec.model.name} given, the checkpoint was trained with {model['name']}")
    now, then = spec.model.model_dump(mode="json")["options"], model.get("options") or {}
    differences += [
        f"model.options.{name}: {now.get(name, 'nothing')} given, the checkpoint was trained with {then.get(name, 'nothing')}"
        for name in sorted({*now, *then})
        if now.get(name) != then.get(name)
    ]
    if (model.get("pruned") or None) != (spec.model.pruned or None):
        differences.append("model.pruned: other sizes of layers given than the checkpoint was trained with")
    size = (saved.get("data") or {}).get("image_size", spec.data.input_side)
    if spec.data.input_side and size != spec.data.input_side:
        differences.append(f"data.image_size: {spec.data.input_side} given, the checkpoint was trained with {size}")
    if names is not None and len(names) != classes:
        differences.append(f"{classes} classes in the data, the checkpoint was trained with {len(names)}")
    return differences


def checkpoint_bytes(spec: Spec, outline: SpecOutline) -> int | None:
    """Estimate the size of a checkpoint of ``spec``; None if the model cannot be outlined without its framework."""
    if outline.state is None:
        return None
    wide = 2 if spec.train.precision == "fp64" else 1
    weights = sum(math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in outline.state.values())
    return weights * wide * (1 + (spec.train.ema is not None) + len(MOMENTS[spec.optimizer.rule]))


def _unfit(outline: SpecOutline, saved: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the differences between a model and the arrays of a checkpoint; empty if they fit."""
    if outline.state is None:  # it cannot be outlined here, so that only its ranks can compare
        return ""
    expected = {name: entry.shape for name, entry in outline.state.items()}
    kinds = {
        "missing": [name for name in expected if name not in saved],
        "unknown": [name for name in saved if name not in expected],
        "of another shape": [
            f"{name} {saved[name]}, expected {shape}"
            for name, shape in expected.items()
            if saved.get(name, shape) != shape
        ],
    }
    differences = [f"{len(names)} {kind} ({', '.join(names[:_SHOWN])})" for kind, names in kinds.items() if names]
    return (
        f"of {len(saved)} saved arrays and {len(expected)} of the model, {', '.join(differences)}"
        if differences
        else ""
    )


def _check_moments(spec: Spec, saved: Mapping[str, Any], folder: Path, weights: list[str]) -> None:
    """Refuse an optimizer that needs other moments than those of the checkpoint.

    Raises:
        CheckpointError: The rule differs, or other parameters are trained.
    """
    moments = shapes_of(folder, "moments")
    if not moments:
        return
    remedy = f"or start a new job from its weights with model.weights: {folder}"
    masked = {name for name in moments if name.startswith("mask/")}
    if bool(masked) != bool(spec.train.prune is not None and spec.train.prune.sparsity > 0):
        raise CheckpointError(
            f"train.prune: {'no masks' if masked else 'masks'} asked for, but {folder} has {'some' if masked else 'none'}; go "
            f"on with the setting it was trained with, {remedy}"
        )
    saved_moments = sorted({name.partition("/")[0] for name in moments if name not in masked})
    # Where muon trains all arrays, which are matrices then, there is no square.
    only_matrices = spec.optimizer.rule == "muon" and saved_moments == ["mean"]
    if saved_moments != sorted(MOMENTS[spec.optimizer.rule]) and not only_matrices:
        raise CheckpointError(
            f"optimizer.rule: {spec.optimizer.rule} given, but {folder} holds the moments of another rule "
            f"({', '.join(saved_moments)}); go on with the rule it was trained with, {remedy}"
        )
    # Patterns that are written otherwise may freeze the same parameters, so the parameters are compared.
    before = (saved.get("train") or {}).get("freeze", spec.train.freeze)
    if _frozen(weights, spec.train.freeze) != _frozen(weights, before):
        raise CheckpointError(
            f"train.freeze: {list(spec.train.freeze)} given, but {folder} was trained with {list(before)} and holds no "
            f"moments for other parameters; go on with that, {remedy}"
        )


def _frozen(names: list[str], patterns: list[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
