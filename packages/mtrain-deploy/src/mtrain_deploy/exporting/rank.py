"""The program of the one rank that writes a trained model as a program for inference, see ``rank_program``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import binding
from mtrain.core.interfaces import NEUTRAL_FRAMEWORKS, Array, Module, RankSession
from mtrain.core.interfaces.program import Program, ProgramInput
from mtrain.core.network import pruned
from mtrain.core.network.quantising import find_ranges
from mtrain.core.record_files import write_json
from mtrain.core.state.digest import digest
from mtrain.errors import CheckpointError, SpecError
from mtrain.spec.references import is_reference
from mtrain.spec.resolved import Resolved
from mtrain.system.ending import end_with
from mtrain.system.runfolder import RunFolder
from mtrain.tasks.datasets import open_data
from mtrain.tasks.description import describe_task
from mtrain.tasks.own.model import OwnFacts
from mtrain.weights.matching import match, refuse_folded
from mtrain.weights.outline import SpecOutline
from mtrain.weights.reading import read
from mtrain_deploy import rank_program
from mtrain_deploy.exporting import own_model

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
    backend, plugin = resolved.backend, resolved.model
    make = _make_own if is_reference(resolved.spec.model.name) else _make
    plugin.check_framework(backend.framework)
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            made = make(resolved, weights, request, session)
            if backend.framework not in NEUTRAL_FRAMEWORKS:
                raise SpecError(
                    f"backend.name: {resolved.spec.backend.name} writes no program of format {made.program.format}"
                )
            writer: Any = import_module(f"mtrain_deploy.exporting.{backend.framework}_program")
            outputs = writer.write(made.build(), made.arrays, made.program)
        except BaseException as error:
            leave(error)
            raise
    facts = {
        "kind": plugin.kind,
        **made.facts,
        "outputs": list(outputs),
        "inputs": [
            {
                "name": given.name or given.key,
                "key": given.key,
                "dtype": given.dtype,
                "layout": given.layout,
                "axes": {str(axis): name for axis, name in given.axis_names.items()},
            }
            for given in made.program.inputs
        ],
        "weights_sha256": digest(made.arrays),
    }
    write_json(folder / FACTS, facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a session writes as a program."""

    program: Program
    build: Callable[[], Module]
    """Builds the network."""
    arrays: Mapping[str, Array]
    """Its state."""
    facts: Mapping[str, Any]
    """What the metadata say of it."""


def _make(resolved: Resolved, weights: Path, request: Mapping[str, Any], session: RankSession) -> Made:
    """Return the network of a model plugin, in its form for inference if it has one of its own."""
    spec = resolved.spec
    plugin: Any = resolved.model
    file = read(weights)
    named = request["class_names"] or file.labels.get("class_names") or spec.data.names or []
    labels: Mapping[str, Any] = file.labels if file.labels.get("class_names") == named else {"class_names": named}
    task = replace(
        describe_task(plugin.kind, spec, tuple(labels["class_names"])), details=file.labels.get("details") or {}
    )
    arrays: Mapping[str, Array] = whole_weights(resolved, weights, classes=len(task.class_names))
    # A re-parameterised network is written in the smaller form that it has for inference.
    fused = plugin.fused(arrays)
    if fused is not None:
        plugin, arrays = type(plugin)(plugin.options.model_copy(update={"deploy": True})), fused
    program = program_of(resolved, plugin, request)
    facts = {
        "options": plugin.options.model_dump(mode="json"),
        "class_names": list(task.class_names),
        "category_ids": list(labels.get("category_ids") or ()),
        "image_size": task.image_size,
        "details": dict(task.details),
        "size_step": program.size_step,
        "ranges": find_ranges(file.arrays),
    }
    collective = session.collective
    return Made(
        program=program,
        build=lambda: pruned.build(plugin, task, collective, spec.model.pruned),
        arrays=arrays,
        facts=facts,
    )


def _make_own(resolved: Resolved, weights: Path, request: Mapping[str, Any], session: RankSession) -> Made:
    """Return a user's own module, whose inputs are the arrays of a batch of the user's data set."""
    spec, plugin = resolved.spec, resolved.model
    arrays = whole_weights(resolved, weights, classes=0)
    inputs = own_model.example_inputs(spec, open_data(spec.data, registry=resolved.registry), batch=request["batch"])
    task = OwnFacts(kind=plugin.kind, class_names=(), image_size=0, global_batch=1, seed=spec.train.seed)
    is_model = request["own"] == "model"
    return Made(
        program=_program(request, inputs),
        build=lambda: own_model.exportable(plugin.build(task, session.collective), forward_gives_loss=is_model),
        arrays=arrays,
        facts={
            "options": {},
            "class_names": [],
            "category_ids": [],
            "image_size": 0,
            "details": {},
            "size_step": 0,
            "ranges": {},
        },
    )


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
    if result.left_over:
        raise CheckpointError(
            f"{result.summary()}: {'; '.join(result.warnings())}; give weights of {spec.model.name} and these classes"
        )
    # Files of other programs have no counters of batches, which only training reads.
    zeros = {name: np.zeros(expected[name].shape, expected[name].dtype) for name in result.counters}
    return {**zeros, **result.matched}


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
    inputs = [given.in_form(channels_first=request["channels_first"], floats=request["floats"]) for given in inputs]
    program = _program(request, inputs, size_step=plugin.size_step if request["dynamic_size"] else 0)
    plugin.check_program(program)
    return program


main = partial(rank_program.run, export)


if __name__ == "__main__":
    end_with(main)
