"""Split a unit of a model over the ranks of FSDP, from weights that are whole or spread over the ranks."""

from collections import defaultdict
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mtrain.backends._fsdp.layout import Layout, piece
from mtrain.backends._torch.spread import Spread

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""The modules that have a weight, and under which names."""


def shard_unit(unit: nn.Module, layout: Layout, spread: Spread | None, *, target: torch.device) -> None:
    """Split the weights of a unit in place; one at a time is whole, where they are spread. Every rank must call.

    Args:
        unit: A model or a part of it, whose own units are split already.
        layout: The mesh of the job.
        spread: Has the weights that are spread; None: all are whole.
        target: The device of the parts.
    """
    if spread is None:
        fully_shard(unit, mesh=layout.data, reshard_after_forward=True)
        return
    parts: dict[nn.Parameter, Tensor] = {}
    places: Places = {}
    for weight, found in _places(unit).items():
        if not spread.is_spread(weight):
            weight.data = weight.data.to(target)
            continue
        # Without values, FSDP finds out alone what belongs where.
        blank = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
        vars(blank).update(vars(weight))
        parts[blank], places[blank] = _own_part(weight, layout, spread).to(target), found
        _put(blank, found)
    fully_shard(unit, mesh=layout.data, reshard_after_forward=True)
    for blank, found in places.items():
        module, name = found[0]
        split = getattr(module, name)
        assert isinstance(split, DTensor), "FSDP splits all weights of a unit"
        local = DTensor.from_local(
            parts.pop(blank),
            split.device_mesh,
            split.placements,
            run_check=False,
            shape=split.shape,
            stride=split.stride(),
        )
        _put(nn.Parameter(local, requires_grad=blank.requires_grad), found)
        if split.shape[0] % layout.mesh.shard:
            # FSDP copies parts of unequal length, for which it looks after a state was loaded.
            for module, _ in found:
                module.load_state_dict({}, strict=False, assign=True)


def _places(unit: nn.Module) -> Places:
    """Return the weights that are not split yet, and where they are."""
    found: Places = defaultdict(list)
    for module in unit.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(weight, DTensor):
                found[weight].append((module, name))
    return dict(found)


def _put(weight: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
    for module, name in places:
        setattr(module, name, weight)


@torch.no_grad()
def _own_part(weight: nn.Parameter, layout: Layout, spread: Spread) -> Tensor:
    """Return the rows of ``weight`` that FSDP leaves this rank; every rank must call."""
    mesh, (rows, *others) = layout.mesh, weight.shape
    first, end = piece((0, rows), layout.ranks["shard"].get_local_rank(), mesh.shard)
    each = prod(others)
    is_even = mesh.replicate == 1 and rows % mesh.shard == 0
    part = spread.part(weight, first * each, end * each, is_even=is_even)
    weight.data = weight.new_empty(0)
    return part.view(end - first, *others)
