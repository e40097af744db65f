"""Write a trained model as a program for inference: the job that ``mtrain export`` gives to one rank."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import binding, pruned
from mtrain.core.checkpoint import store
from mtrain.core.digest import digest
from mtrain.core.interfaces import Array, Backend
from mtrain.core.program import Program
from mtrain.core.quantising import trained_ranges
from mtrain.errors import CheckpointError, SpecError
from mtrain.rank.assembly import backend_plugin, model_plugin, task_kind
from mtrain.report.reporter import write_json
from mtrain.spec.model import Spec
from mtrain.tasks.description import describe_task
from mtrain.weights.matching import match, refuse_folded
from mtrain.weights.outline import SpecOutline
from mtrain.weights.reading import read

REQUEST = "export.json"
FACTS = "exported.json"
"""File in the folder of the job in which the rank describes what it wrote."""


def export(spec: Spec, folder: Path, weights: Path, *, leave: Callable[[BaseException], None]) -> None:
    """Write the program that ``export.json`` in ``folder`` asks for, and describe it in ``exported.json``.

    The request has the keys ``format``, ``path``, ``raw``, ``half``, ``batch``, ``dynamic_size``, ``opset`` and
    ``class_names`` (of a file of weights, which does not say them).

    Args:
        spec: The resolved spec.
        folder: Folder with the request.
        weights: A checkpoint, whose averaged weights are used, or a file of weights.
        leave: Records an error, see ``process.Leaving``.

    Raises:
        UsageError: The weights do not fit, or the model cannot be written in this form.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    extra: Mapping[str, Any] = store.load(weights).meta["extra"] if weights.is_dir() else {}
    plugin: Any = model_plugin(spec)
    labels = extra if extra.get("class_names") else {"class_names": request["class_names"]}
    task = replace(
        describe_task(plugin.kind, spec, tuple(labels["class_names"])),
        details=extra.get("details") or {},
    )
    backend: Backend = backend_plugin(spec)
    plugin.check_framework(backend.framework)
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            state = whole_weights(spec, weights, classes=len(task.class_names))
            plugin, arrays = _for_inference(plugin, state)
            program = program_of(spec, plugin, request)
            outputs = session.export(
                lambda: pruned.build(plugin, task, session.collective, spec.model.pruned), arrays, program
            )
            if not outputs:
                raise SpecError(f"backend.name: {spec.backend.name} writes no program of format {program.format}")
        except BaseException as error:
            leave(error)
            raise
    facts = {
        "kind": plugin.kind,
        "options": plugin.options.model_dump(mode="json"),
        "class_names": list(task.class_names),
        "category_ids": list(labels.get("category_ids") or ()),
        "image_size": task.image_size,
        "details": dict(task.details),
        "outputs": list(outputs),
        "size_step": program.size_step,
        "weights_sha256": digest(arrays),
        "ranges": trained_ranges(read(weights).arrays),
    }
    write_json(folder / FACTS, facts)


def whole_weights(spec: Spec, weights: Path, *, classes: int) -> dict[str, Array]:
    """Return the whole state of the model of ``spec``, as a checkpoint (its averaged weights) or a file has it.

    Raises:
        CheckpointError: The weights cannot be read, or are not those of this model with so many classes.
    """
    file = read(weights)
    plugin = model_plugin(spec)
    expected = None if plugin.native else SpecOutline(spec, classes=classes).state
    if expected is None:
        return file.arrays
    result = refuse_folded(match(file, expected, plugin.published))
    if result.unmatched:
        raise CheckpointError(
            f"{result.summary()}: {'; '.join(result.warnings())}; give weights of {spec.model.name} and these classes"
        )
    zeros = {name: np.zeros(expected[name].shape, expected[name].dtype) for name in result.counters}
    return {**zeros, **result.matched}


def _for_inference(plugin: Any, arrays: dict[str, Array]) -> tuple[Any, Mapping[str, Array]]:
    """Return the plugin and the state of the network's form for inference, if it has one of its own."""
    fused = plugin.fused(arrays)
    if fused is None:
        return plugin, arrays
    return type(plugin)(plugin.options.model_copy(update={"deploy": True})), fused


def program_of(spec: Spec, plugin: Any, request: Mapping[str, Any]) -> Program:
    """Return the program that a request asks for.

    Raises:
        SpecError: The model cannot be written in this form.
    """
    inputs = task_kind(spec, plugin.kind).inputs(spec)
    if not inputs:
        raise SpecError(
            f"model.name: {spec.model.name} cannot be exported; its task {plugin.kind} does not say what it reads"
        )
    if request["dynamic_size"] and not plugin.size_step:
        raise SpecError(f"--dynamic-size: {spec.model.name} takes pictures of one size only; leave the flag out")
    return Program(
        format=request["format"],
        path=Path(request["path"]),
        inputs=inputs,
        batch=request["batch"],
        size_step=plugin.size_step if request["dynamic_size"] else 0,
        raw=request["raw"],
        half=request["half"],
        opset=request["opset"],
    )
