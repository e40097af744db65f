"""Copies of a script's optimizer for other tensors: for the parts of its parameters that a rank holds, or for a trial."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain.backends._torch.native import Made


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A tensor in the place of a parameter, which stands for some of the parameter's elements."""

    tensor: Tensor
    first: int
    """Number of the element of the flattened parameter with which it begins."""

    def of(self, value: Any, whole: torch.Size) -> Any:
        """Return this piece of an entry of the optimizer's state: where it has the shape of the parameter, ``whole``."""
        if not isinstance(value, Tensor) or value.shape != whole or value.dim() == 0:
            return copy.deepcopy(value)
        end = self.first + self.tensor.numel()
        piece = value.detach().reshape(-1)[self.first : end]
        return piece.to(self.tensor.device, copy=True).reshape(self.tensor.shape)


def move_optimizer(made: Made, pieces: Mapping[int, ParameterPiece]) -> Any:
    """Return a copy of an optimizer that steps ``pieces`` in the place of its parameters, which are the keys, by identity.

    Parameters without a piece are left out. Whatever else the optimizer holds is copied with it.

    Raises:
        Exception: it holds something that cannot be copied.
    """
    # ``copy.deepcopy`` of an optimizer keeps the parameter groups and the state alone, and would copy the parameters.
    optimizer = made.optimizer
    memo: dict[int, Any] = {}
    state: defaultdict[Any, Any] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    memo[id(optimizer.state)], memo[id(optimizer.param_groups)] = state, groups
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        piece = pieces.get(id(parameter))
        memo[id(parameter)] = parameter if piece is None else piece.tensor
    for group in optimizer.param_groups:
        other = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        kept = [i for i, parameter in enumerate(group["params"]) if id(parameter) in pieces]
        groups.append({"params": [pieces[id(group["params"][i])].tensor for i in kept], **copy.deepcopy(other, memo)})
        if "param_names" in group:
            groups[-1]["param_names"] = [group["param_names"][i] for i in kept]
    own = {id(parameter) for parameter in parameters}
    for key, entry in optimizer.state.items():
        if id(key) not in own:
            state[key] = copy.deepcopy(entry, memo)
        elif id(key) in pieces:
            piece = pieces[id(key)]
            state[piece.tensor] = {name: piece.of(value, made.shapes[id(key)]) for name, value in entry.items()}
    other_self = object.__new__(type(optimizer))
    vars(other_self).update(copy.deepcopy(vars(optimizer), memo))
    return other_self
