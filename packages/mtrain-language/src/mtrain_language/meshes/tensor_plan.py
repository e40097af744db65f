"""Which layers of a model the ranks of a tensor group share, and how: the plan of a spec, or the model's own."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from mtrain.core.interfaces import Mesh
from mtrain.errors import SpecError

Style = str | ParallelStyle
"""A name of ``STYLES``, or a style of torch."""
STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding_rowwise",
    "grad_allreduce": "grad_allreduce",
    "replicated_with_grad_allreduce": "grad_allreduce",
    "replicate": "",
}
"""Maps a style, as transformers names it, to the one of ``parallel.plan``; '': every rank computes the whole layer."""


def plan_of(model: nn.Module, mesh: Mesh) -> dict[str, Style]:
    """Return the style of each layer that a tensor group shares, by the layer's name.

    Raises:
        SpecError: There is no plan, it names no layer of the model, or it has a style that is not known here.
    """
    patterns, source = _patterns(model, mesh)
    plan: dict[str, Style] = {}
    for pattern, style in patterns.items():
        regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        found = [name for name, _ in model.named_modules() if name and regex.fullmatch(name)]
        if not found and source == "parallel.plan":
            names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
            raise SpecError(
                f"parallel.plan: {pattern!r} is the name of no layer of the model; they are like {', '.join(names[:3])}"
            )
        known = style if isinstance(style, ParallelStyle) else STYLES.get(style)
        if known is None and found:
            raise SpecError(
                f"parallel.tensor: {source} shares {found[0]} in the way {style!r}, which is not known here; give a plan of "
                "your own (parallel.plan), or parallel.tensor=1"
            )
        plan |= dict.fromkeys(found, known) if known else {}
    if not plan:
        raise SpecError(
            f"parallel.tensor: {mesh.tensor} given, but {source} names no layer of this model; give parallel.tensor=1, and "
            "parallel.shard or parallel.replicate"
        )
    return plan


def _patterns(model: nn.Module, mesh: Mesh) -> tuple[Mapping[str, Style], str]:
    """Return the plan by patterns of names, and what gives it."""
    if mesh.plan:
        return mesh.plan, "parallel.plan"
    if attribute := getattr(model, "parallelize_plan", None):
        return cast(Mapping[str, Style], attribute), "the model's parallelize_plan"
    own = getattr(model, "tp_plan", None)
    kind = type(model).__name__
    if own and any(style in STYLES and "." in name for name, style in own.items()):
        return cast(Mapping[str, Style], own), f"the plan of transformers for {kind}"
    raise SpecError(
        f"parallel.tensor: {mesh.tensor} given, but {kind} has no plan of its own by which ranks could share its layers; give one "
        "by names of layers, as parallel.plan={'layers.*.mlp.up_proj': colwise, 'layers.*.mlp.down_proj': rowwise}, or "
        "parallel.tensor=1"
    )


def ties(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each weight that several layers share, as (name of the layer, layer, name of its weight)."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, module, key))
    return [shared for shared in places.values() if len(shared) > 1]


def without_uneven(plan: Mapping[str, Style], model: nn.Module, mesh: Mesh) -> dict[str, Style]:
    """Leave out the embedding and output layers of a model's own plan whose vocabulary does not divide among the ranks.

    Every rank then computes them whole. A plan in the spec is refused instead, by ``check_sizes``.
    """
    if mesh.plan:
        return dict(plan)
    by_vocabulary = ("embedding_rowwise", "colwise_gather_output")
    vocabularies = {
        name: cast(Any, model.get_submodule(name)).weight.shape[0] for name in plan if plan[name] in by_vocabulary
    }
    uneven = {name for name, length in vocabularies.items() if length % mesh.tensor}
    return {name: style for name, style in plan.items() if name not in uneven}


def with_ties(plan: Mapping[str, Style], model: nn.Module) -> dict[str, Style]:
    """Return the plan in which an embedding is shared as the output layer that has its weight.

    Raises:
        SpecError: Layers with one weight cannot be shared alike.
    """
    completed = dict(plan)
    for places in ties(model):
        if not any(name in plan for name, _, _ in places):
            continue
        for name, module, _ in places:
            style = completed.get(name)
            if isinstance(module, nn.Embedding) and style is None:
                completed[name] = "embedding_rowwise"
            elif isinstance(module, nn.Linear) and style is None:
                completed[name] = "colwise_gather_output"
        if not all(_cuts_first_axis(module, completed.get(name)) for name, module, _ in places):
            names = " and ".join(name for name, _, _ in places)
            raise SpecError(
                f"parallel.plan: {names} have one weight, and are not shared alike; share the embedding as embedding_rowwise and "
                "the output layer as colwise_gather_output, or neither"
            )
    return completed


def _cuts_first_axis(module: nn.Module, style: Style | None) -> bool:
    by_linear = ("colwise", "colwise_gather_output")
    return (isinstance(module, nn.Embedding) and style == "embedding_rowwise") or (
        isinstance(module, nn.Linear) and style in by_linear
    )


def check_sizes(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh) -> None:
    """Refuse layers, and heads of attention, that do not divide among the ranks of a tensor group.

    Raises:
        SpecError: There are such.
    """
    config: Any = getattr(model, "config", None)
    heads = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    # Heads that are cut in two would mix with those of another rank.
    if any(style == "colwise" and re.search(r"att", name) for name, style in plan.items()):
        for key, count in heads.items():
            if isinstance(count, int) and count % mesh.tensor:
                raise SpecError(
                    f"parallel.tensor: {mesh.tensor} given, but the model has {count} heads ({key}), which do not divide among "
                    f"so many ranks; give a divisor of {count}"
                )
    for name, module, axis, length in _cut_lengths(model, plan):
        if length % mesh.tensor:
            raise SpecError(
                f"parallel.tensor: {mesh.tensor} given, but axis {axis} of {name}.weight ({type(module).__name__}) has {length} "
                "elements, which do not divide among so many ranks; give a divisor"
            )


def _cut_lengths(model: nn.Module, plan: Mapping[str, Style]) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield (name of the layer, layer, axis, its length) of each weight that is cut by a named style."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if isinstance(style, str) and style != "grad_allreduce" and weight is not None:
            axis = weight_axis(module, style)
            yield name, module, axis, weight.shape[axis]


def weight_axis(module: nn.Module, style: str) -> int:
    """Return the axis of the weight that a style cuts. GPT-2's own layer has inputs first, where torch's has outputs."""
    by_rows = style in ("rowwise", "rowwise_split_input")
    return int(by_rows != has_inputs_first(module))


def has_inputs_first(module: nn.Module) -> bool:
    """Return whether the layer is transformers' ``Conv1D``, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
