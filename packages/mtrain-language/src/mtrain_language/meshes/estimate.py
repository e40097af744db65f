"""Find, for a plan, which arrays a model has and how a mesh cuts them; ``python -m``, in a process of its own.

It reads a question as JSON from standard input: ``model``, ``options``, ``policy`` (the ``plugins.toml``), ``details`` of the
task, ``mesh``, ``rows`` of a micro batch, what is ``frozen``, and the backend's ``unit``. The model is built
without values. It prints the answer as JSON, or null where stages cannot be counted.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mtrain.backends._fsdp.units import units
from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.interfaces import Mesh, Task
from mtrain.spec.registry import Registry
from mtrain_language.meshes import flops
from mtrain_language.meshes.stages import Division, divide
from mtrain_language.meshes.tensor import whole_plan
from mtrain_language.meshes.tensor_plan import Style


def _answer(question: Mapping[str, Any]) -> dict[str, Any] | None:
    plugin = Registry.read(question["policy"]).make(
        "models", question["model"], question["options"], path="model.options"
    )
    task = Task(kind=plugin.kind, class_names=[], image_size=0, global_batch=1, details=question["details"])
    with torch.device("meta"):
        model: nn.Module = plugin.without_values(task)
    flops.freeze(model, question["frozen"])
    mesh = Mesh(**question["mesh"])
    plan = whole_plan(model, mesh) if mesh.tensor > 1 else {}
    operations = flops.of_micro_batch(model, plugin.blank_batch(task, rows=question["rows"]))
    if mesh.pipeline > 1:
        held = _find_stages(model, plan, mesh)
        return None if held is None else {"arrays": held, "operations": operations}
    parts = units(model, question["unit"])
    unit_of = {id(x): name for name, part in reversed(parts.items()) for x in part.parameters()}
    arrays = [
        [name, list(parameter.shape), _is_cut(name, plan), parameter.requires_grad, unit_of.get(id(parameter), "")]
        for name, parameter in model.named_parameters()
    ]
    return {"arrays": arrays, "operations": operations}


def _find_stages(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh) -> list[list[Any]] | None:
    """Return the arrays of a model in stages, each with the stages that hold it."""
    if not flops.is_counted(model):
        return None
    flops.use_plain_attention(model)
    division = divide(model, mesh.pipeline)
    return [
        [
            name,
            list(x.shape),
            _is_cut(name, plan),
            x.requires_grad,
            _part_of(name, division),
            list(division.holders[name]),
        ]
        for name, x in model.named_parameters()
    ]


def _part_of(name: str, division: Division) -> str:
    """Return the block, or the module beside them, that holds a parameter."""
    return next((part for parts in division.parts for part in parts if name.startswith(f"{part}.")), "")


def _is_cut(name: str, plan: Mapping[str, Style]) -> bool:
    layer, _, key = name.rpartition(".")
    style = plan.get(layer, "grad_allreduce")
    by_rows = style in ("rowwise", "rowwise_split_input")
    return style != "grad_allreduce" and not (by_rows and key == "bias")


def main() -> None:
    """Answer the question on standard input."""
    bind(torch_nn, torch_ops)
    question = json.load(sys.stdin)
    print(json.dumps(_answer(question)))


if __name__ == "__main__":
    main()
