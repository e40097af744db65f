"""Refuse whole arrays that a script loads into a model of which each rank holds a part."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from mtrain.errors import SpecError


def refuse(model: nn.Module, is_split: Callable[[Tensor, Tensor], bool]) -> None:
    """Let ``load_state_dict`` of a model and of its parts refuse whole arrays.

    Copies of the model and of its parts, which have these hooks too, are whole and may load what they like.

    Args:
        model: The model, after its weights were split.
        is_split: Whether a weight, given first, is split, and the value for it, given then, is not.
    """
    own = {id(weight) for weight in model.parameters()}

    def check(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for key, weight in module.named_parameters(recurse=False):
            value = state.get(prefix + key)
            if isinstance(value, Tensor) and id(weight) in own and is_split(weight, value):
                raise SpecError(
                    f"load_state_dict: the whole array {prefix}{key} given, but this backend trains parts of it, one on each rank; load it "
                    "in the function that session.prepare is given, before that returns the model"
                )

    for module in model.modules():
        module.register_load_state_dict_pre_hook(check)
