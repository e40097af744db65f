"""The program of the one rank that writes a trained model as a program for inference, see ``rank_program``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import binding, pruned
from mtrain.core.digest import digest
from mtrain.core.interfaces import Array, RankSession
from mtrain.core.interfaces.capabilities import Export
from mtrain.core.interfaces.program import Program, ProgramInput
from mtrain.core.quantising import trained_ranges
from mtrain.core.record_files import write_json
from mtrain.errors import CheckpointError, SpecError
from mtrain.spec.references import is_reference
from mtrain.spec.resolved import Resolved
from mtrain.system.ending import end_with
from mtrain.system.runfolder import RunFolder
from mtrain.tasks.datasets import open_data
from mtrain.tasks.description import describe_task
from mtrain.tasks.own import exporting as own_exporting
from mtrain.tasks.own.model import OwnFacts
from mtrain.weights.matching import match, refuse_folded
from mtrain.weights.outline import SpecOutline
from mtrain.weights.reading import read
from mtrain_deploy import rank_program

REQUEST = "export.json"
FACTS = "exported.json"
"""File in the folder of the job in which the rank describes what it wrote."""


def export(resolved: Resolved, run_folder: RunFolder, weights: Path, *, leave: Callable[[BaseException], None]) -> None:
    """Write the program that ``export.json`` in the folder asks for, and describe it in ``exported.json``.

    The request has the keys ``format``, ``path``, ``raw``, ``half``, ``batch``, ``dynamic_size``, ``opset``,
    ``channels_first``, ``floats``, ``suppression`` (of a Paddle program) and ``class_names`` (of a file of weights; empty: those
    of the checkpoint).

    Args:
        resolved: The spec and its plugins.
        run_folder: Folder with the request.
        weights: A checkpoint, whose averaged weights are used, or a file of weights.
        leave: Records an error, see ``process.Leaving``.

    Raises:
        UsageError: The weights do not fit, or the model cannot be written in this form.
    """
    folder = run_folder.path
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    extra: Mapping[str, Any] = read(weights).labels
    spec, plugin = resolved.spec, resolved.model
    if is_reference(spec.model.name):
        _export_own(resolved, folder, weights, request, plugin, leave=leave)
        return
    named = request["class_names"] or extra.get("class_names") or spec.data.names or []
    labels = extra if extra.get("class_names") == named else {"class_names": named}
    task = replace(
        describe_task(plugin.kind, spec, tuple(labels["class_names"])),
        details=extra.get("details") or {},
    )
    backend = resolved.backend
    plugin.check_framework(backend.framework)
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            state = whole_weights(resolved, weights, classes=len(task.class_names))
            plugin, arrays = _for_inference(plugin, state)
            program = program_of(resolved, plugin, request)
            outputs = _export_of(session, spec, program)(
                lambda: pruned.build(plugin, task, session.collective, spec.model.pruned), arrays, program
            )
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
        "inputs": _described(program.inputs),
        "weights_sha256": digest(arrays),
        "ranges": trained_ranges(read(weights).arrays),
    }
    write_json(folder / FACTS, facts)


def _export_of(session: RankSession, spec: Any, program: Program) -> Export:
    """Return the function by which a session writes programs.

    Raises:
        SpecError: It writes none.
    """
    export = session.capabilities.export
    if export is None:
        raise SpecError(f"backend.name: {spec.backend.name} writes no program of format {program.format}")
    return export


def _export_own(
    resolved: Resolved,
    folder: Path,
    weights: Path,
    request: Mapping[str, Any],
    plugin: Any,
    *,
    leave: Callable[[BaseException], None],
) -> None:
    """Write the program of a user's own module, whose inputs are the arrays of a batch of the user's data set."""
    spec, backend = resolved.spec, resolved.backend
    plugin.check_framework(backend.framework)
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            arrays = whole_weights(resolved, weights, classes=0)
            data = open_data(spec.data, registry=resolved.registry)
            inputs = own_exporting.example_inputs(spec, data, batch=request["batch"])
            task = OwnFacts(kind=plugin.kind, class_names=(), image_size=0, global_batch=1, seed=spec.train.seed)
            program = _program(request, inputs)
            outputs = _export_of(session, spec, program)(
                lambda: own_exporting.exportable(
                    plugin.build(task, session.collective), forward_gives_loss=request["own"] == "model"
                ),
                arrays,
                program,
            )
        except BaseException as error:
            leave(error)
            raise
    facts = {
        "kind": plugin.kind,
        "options": {},
        "class_names": [],
        "category_ids": [],
        "image_size": 0,
        "details": {},
        "inputs": _described(inputs),
        "outputs": list(outputs),
        "size_step": 0,
        "weights_sha256": digest(arrays),
        "ranges": {},
    }
    write_json(folder / FACTS, facts)


def _described(inputs: Sequence[ProgramInput]) -> list[dict[str, Any]]:
    return [
        {
            "name": given.name or given.key,
            "key": given.key,
            "dtype": given.dtype,
            "layout": given.layout,
            "axes": {str(axis): name for axis, name in given.axis_names.items()},
        }
        for given in inputs
    ]


def _program(request: Mapping[str, Any], inputs: Sequence[ProgramInput], *, size_step: int = 0) -> Program:
    return Program(
        format=request["format"],
        path=Path(request["path"]),
        inputs=inputs,
        batch=request["batch"],
        size_step=size_step,
        raw=request["raw"],
        half=request["half"],
        suppression=request["suppression"],
        opset=request["opset"],
    )


def whole_weights(resolved: Resolved, weights: Path, *, classes: int) -> dict[str, Array]:
    """Return the whole state of the model of a job, as a checkpoint (its averaged weights) or a file has it.

    Raises:
        CheckpointError: The weights cannot be read, or are not those of this model with so many classes.
    """
    file = read(weights)
    spec, plugin = resolved.spec, resolved.model
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


def program_of(resolved: Resolved, plugin: Any, request: Mapping[str, Any]) -> Program:
    """Return the program that a request asks for.

    Raises:
        SpecError: The model cannot be written in this form.
    """
    spec = resolved.spec
    inputs = resolved.task_named(plugin.kind).inputs(spec)
    if not inputs:
        raise SpecError(
            f"model.name: {spec.model.name} cannot be exported; its task {plugin.kind} does not say what it reads"
        )
    if request["dynamic_size"] and not plugin.size_step:
        raise SpecError(f"--dynamic-size: {spec.model.name} takes images of one size only; leave the flag out")
    if plugin.size_step > 1 and spec.data.input_side % plugin.size_step:
        side, step = spec.data.input_side, plugin.size_step
        raise SpecError(
            f"data.image_size: {side} is no multiple of {step}, the step of {spec.model.name}; use {max(round(side / step), 1) * step}"
        )
    inputs = [given.asked(channels_first=request["channels_first"], floats=request["floats"]) for given in inputs]
    program = _program(request, inputs, size_step=plugin.size_step if request["dynamic_size"] else 0)
    plugin.check_program(program)
    return program


main = partial(rank_program.run, export)


if __name__ == "__main__":
    end_with(main)
