"""Find, for a plan, which arrays a model has and how a mesh cuts them; ``python -m``, in a process of its own.

It reads a question as JSON from standard input: ``model``, ``options``, ``policy`` (the ``plugins.toml``), ``details`` of the
task, ``mesh``, ``rows`` of a micro batch, what is ``frozen``, the ``device``, and the backend's ``unit``. The model is built
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
from mtrain_language.meshes import flops, vocabulary
from mtrain_language.meshes.sequence import blocks
from mtrain_language.meshes.stages import Division, divide
from mtrain_language.meshes.tensor import whole_plan
from mtrain_language.meshes.tensor_adapters import is_adapter, layer_of
from mtrain_language.meshes.tensor_plan import Style, has_inputs_first

_OF_LOSS = 3
"""Numbers of each token that are exchanged for its loss: the largest logit, the sum of exponentials, the token's own."""


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
        found = _find_stages(model, plan, mesh, device=question["device"])
        return found and {**found, "operations": operations}
    parts = units(model, question["unit"])
    unit_of = {id(x): name for name, part in reversed(parts.items()) for x in part.parameters()}
    arrays = [
        [name, list(parameter.shape), _is_cut(name, plan), parameter.requires_grad, unit_of.get(id(parameter), "")]
        for name, parameter in model.named_parameters()
    ]
    sent = _sent_per_token(model, plan, mesh, device=question["device"])
    return {"arrays": arrays, "sent_per_token": sent, "operations": operations}


def _find_stages(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh, *, device: str) -> dict[str, Any] | None:
    """Return the arrays of a model in stages, each with the stages that hold it, and what stages send."""
    if not flops.is_counted(model):
        return None
    flops.use_plain_attention(model)
    division = divide(model, mesh.pipeline)
    size = division.width
    arrays = [
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
    own = [
        {name: style for name, style in plan.items() if _holds(division, stage, name)} for stage in range(mesh.pipeline)
    ]
    last = mesh.pipeline - 1
    sent = [
        _sent_per_token(model, styles, mesh, device=device, ends=(stage == 0) + (stage == last))
        for stage, styles in enumerate(own)
    ]
    between = [size * ((stage > 0) + (stage < mesh.pipeline - 1)) for stage in range(mesh.pipeline)]
    return {"arrays": arrays, "sent_per_token": sent, "between_stages": between}


def _part_of(name: str, division: Division) -> str:
    """Return the block, or the module beside them, that holds a parameter."""
    return next((part for parts in division.parts for part in parts if name.startswith(f"{part}.")), "")


def _holds(division: Division, stage: int, layer: str) -> bool:
    return any(layer == part or layer.startswith(f"{part}.") for part in division.parts[stage])


def _is_cut(name: str, plan: Mapping[str, Style]) -> bool:
    layer, _, key = name.rpartition(".")
    style = plan.get(layer, "grad_allreduce")
    by_rows = style in ("rowwise", "rowwise_split_input")
    return style != "grad_allreduce" and not (by_rows and key == "bias")


def _sent_per_token(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh, *, device: str, ends: int = 2) -> float:
    """Return how many numbers a rank sends to its tensor group for each token, forward and backward, in rings.

    ``ends``: 2, or 1 where a rank has only the beginning or the end of the blocks, and 0 between.
    """
    gather = (mesh.tensor - 1) / mesh.tensor  # of what is gathered or scattered; adding up does both
    scatter = gather * (2 if device == "cpu" else 1)  # gloo adds everything up first
    sent = 0.0
    split = vocabulary.split_layers(model, plan)
    parents = set()
    for name, style in plan.items():
        module: Any = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if not isinstance(style, str) or style == "grad_allreduce" or weight is None:
            continue
        outputs, inputs = weight.shape[::-1] if has_inputs_first(module) else weight.shape
        if style == "embedding_rowwise":
            sent += 2 * gather * inputs
        elif style == "colwise" and mesh.sequence and not is_adapter(name):
            parents.add((layer_of(name).rpartition(".")[0], inputs))
        elif style == "colwise":
            sent += 2 * gather * inputs
        elif style == "colwise_gather_output":
            sent += 2 * gather * (inputs + _OF_LOSS) if name in split else gather * (outputs + 2 * inputs)
        elif mesh.sequence and not is_adapter(name):
            sent += (scatter + gather) * outputs  # scattered here, and gathered backward
        else:
            sent += 2 * gather * outputs
    if mesh.sequence:
        # Texts are gathered in front of a half of a layer, and gradients scattered behind it. At the end they are gathered too, and
        # the gradients of where they were divided.
        sent += sum((gather + scatter) * inputs for _, inputs in parents)
        sent += ends * gather * sum(x.numel() for x in blocks(model)[2].parameters(recurse=False))
    return sent


def main() -> None:
    """Answer the question on standard input."""
    bind(torch_nn, torch_ops)
    question = json.load(sys.stdin)
    print(json.dumps(_answer(question)))


if __name__ == "__main__":
    main()
