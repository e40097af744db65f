"""Low-rank adapters, as peft puts them beside layers, where a tensor group shares these layers.

An adapted layer has its weights in ``base_layer``, and adds ``B A x``. Where outputs are cut (by columns), A is whole on each
rank and B is cut like the base; where inputs are cut (by rows), A is cut like the base and B is whole. Ranks exchange ``A x``,
which has as many numbers as the rank of the adapter.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from mtrain.errors import SpecError
from mtrain_language.meshes.tensor_plan import Style

_PART = re.compile(r"\.(?:base_layer|lora_[AB]\.[^.]+)$")


def layer_of(name: str) -> str:
    """Return the adapted layer of which ``name`` is a part; a layer without adapters is its own."""
    return _PART.sub("", name)


def is_adapter(name: str) -> bool:
    """Return whether ``name`` is the A or the B of an adapter."""
    return _PART.search(name) is not None and not name.endswith(".base_layer")


def with_adapters(plan: Mapping[str, Style], model: nn.Module) -> dict[str, Style]:
    """Return the plan in which each adapted layer is replaced by its base and what is cut of its adapters.

    Raises:
        SpecError: Adapters of a layer cannot be cut as the layer is.
    """
    completed: dict[str, Style] = {}
    for name, style in plan.items():
        layer: Any = model.get_submodule(name)
        if not hasattr(layer, "base_layer"):
            completed[name] = style
            continue
        side = {"colwise": "B", "colwise_gather_output": "B", "rowwise": "A", "rowwise_split_input": "A"}.get(
            str(style)
        )
        if side is None or not isinstance(style, str) or not len(layer.lora_A):
            raise SpecError(
                f"model.options.lora.targets: {name} ({type(layer.base_layer).__name__}) is shared by the ranks of a tensor group, "
                "and cannot have adapters there; leave it out of the targets, or give parallel.tensor=1"
            )
        completed[f"{name}.base_layer"] = style
        completed |= {f"{name}.lora_{side}.{adapter}": style for adapter in layer.lora_A}
    return completed


def dropouts(layer: nn.Module) -> list[nn.Module]:
    """Return what drops inputs of a layer's adapters."""
    found = getattr(layer, "lora_dropout", {})
    return [part for part in found.values() if isinstance(part, nn.Dropout)]
