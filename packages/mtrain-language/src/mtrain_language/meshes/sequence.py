"""Sequence parallelism: between the layers that a tensor group shares, each of its ranks keeps a part of every text.

A part of the texts goes through the norms and the residual stream; in front of attention and feed-forward layers the parts
are gathered, and behind them the sums are scattered again.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mtrain.errors import SpecError
from mtrain_language.meshes.tensor_adapters import is_adapter, layer_of
from mtrain_language.meshes.tensor_plan import Style

TEXT_AXIS = 1
"""Axis of the texts in hidden states, (B, L, H)."""


def share_texts(model: nn.Module, plan: Mapping[str, Style], tensor: DeviceMesh) -> list[str]:
    """Divide texts among the ranks of a tensor group, in place, in a model whose layers are shared.

    Returns the parameters of which each rank then has a part of the gradient.

    Raises:
        SpecError: The model is not built as this needs it.
    """
    prefix, layers, norm = blocks(model)
    by_rows = {layer_of(name) for name, style in plan.items() if style == "rowwise"}
    shared = {half_of(name) for name in by_rows}
    halves = [f"{prefix}layers.{i}.{child}" for i, layer in enumerate(layers) for child, _ in layer.named_children()]
    alone = [name for name in halves if name not in shared]
    strange = [name for name in alone if not type(model.get_submodule(name)).__name__.endswith("Norm")]
    if strange or not shared <= set(halves):
        named = sorted(strange) or sorted(shared - set(halves))
        raise SpecError(
            f"parallel.sequence: true given, but {named[0]} of the model is neither a norm nor shared as a whole by the plan; give "
            "parallel.sequence=false"
        )
    layers[0].register_forward_pre_hook(on_first_input(lambda x: _divide(x, tensor)), with_kwargs=True)
    for name in shared:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(on_first_input(lambda x: _gather(x, tensor)), with_kwargs=True)
    norm.register_forward_hook(lambda module, inputs, output: _gather(output, tensor).to_local())
    _take_whole_texts(model, plan)
    adapters = {name.rpartition(".")[0] for name, _ in model.named_parameters() if ".lora_B." in name}
    owners = {*alone, f"{prefix}norm", *(name for name in adapters if layer_of(name) in by_rows)}
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in owners]


def half_of(name: str) -> str:
    """Return the half of a block, attention or feed-forward layer, of which the layer ``name`` is a part."""
    return layer_of(name).rpartition(".")[0]


def _take_whole_texts(model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Let adapters whose A is whole take gathered texts as every rank has them; what they return is added up behind A."""
    for name in {layer_of(name) for name, style in plan.items() if style == "colwise" and is_adapter(name)}:
        layer: Any = model.get_submodule(name)
        for part in layer.lora_dropout.values():
            part.register_forward_pre_hook(lambda module, inputs: _whole(inputs[0]))


def _whole(x: Tensor) -> Tensor:
    return x.to_local(grad_placements=[Replicate()]) if isinstance(x, DTensor) else x


def blocks(model: nn.Module) -> tuple[str, nn.ModuleList, nn.Module]:
    """Return the prefix of names, the layers, and the last norm of a model as transformers builds most of them."""
    for name, module in model.named_modules():
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module) and len(layers):
            return f"{name}." if name else "", layers, norm
    raise SpecError(
        f"parallel.sequence: true given, but {type(model).__name__} has no `layers` followed by a `norm`, as Llama has; give "
        "parallel.sequence=false"
    )


def on_first_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a hook that changes the hidden states, however they are given."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": change(keywords["hidden_states"])}

    return hook


def _divide(x: Tensor, tensor: DeviceMesh) -> Tensor:
    if x.shape[TEXT_AXIS] % tensor.size():
        raise SpecError(
            f"parallel.sequence: texts of {x.shape[TEXT_AXIS]} tokens do not divide among the {tensor.size()} ranks of a tensor group; "
            f"give a data.length that {tensor.size()} divides"
        )
    placed = DTensor.from_local(x, tensor, [Replicate()], run_check=False)
    part: Tensor = placed.redistribute(placements=[Shard(TEXT_AXIS)]).to_local()
    return part


def _gather(x: Tensor, tensor: DeviceMesh) -> DTensor:
    """Return whole texts; layers that are cut by columns take them as they are, so their gradients are added up once."""
    placed = DTensor.from_local(x, tensor, [Shard(TEXT_AXIS)], run_check=False)
    return placed.redistribute(placements=[Replicate()])
