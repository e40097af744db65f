"""Leave each rank its parts of a model whose weights are whole, or spread over the ranks.

Weights that are spread are cut before FSDP sees them, one at a time: it gets weights without values, with which it finds out what
belongs where, and each rank puts its parts in their place.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtrain.backends._fsdp import internals
from mtrain.backends._fsdp.layout import MeshLayout
from mtrain.backends._torch.sharded.shards import Boxes
from mtrain.backends._torch.sharded.spread import Spread

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""The modules that have a weight, and under which names."""


def without_values(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace the weights of a model by ones without values, in place, and return the former ones, by all of their names.

    What is one weight under several names stays one.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    for weight, found in _places(model).items():
        blank = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
        vars(blank).update(vars(weight))
        _put(blank, found)
    return weights


class OwnParts:
    """This rank's parts of the weights of a model, until FSDP has split it."""

    def __init__(self, layout: MeshLayout, *, rank: int, target: torch.device) -> None:
        """Hold the parts of rank number ``rank`` of a mesh on the device ``target``."""
        self._layout = layout
        self._rank = rank
        self._target = target
        self._parts: dict[nn.Parameter, Tensor] = {}
        """By the weights without values that stand for them."""

    @torch.no_grad()
    def take(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        boxes: Mapping[str, Boxes],
        spread: Spread,
    ) -> None:
        """Take the parts of ``weights``, one of which at a time is whole, and drop these; every rank must call.

        Args:
            model: Has weights without values in their places.
            weights: See ``without_values``.
            boxes: Where all ranks' parts lie.
            spread: Has the weights.
        """
        mesh = self._layout.mesh
        blanks = dict(model.named_parameters(remove_duplicate=False))
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, weight in weights.items():
            names[weight].append(name)
        for weight, (first, *others) in names.items():
            is_even = mesh.shard == mesh.size and weight.shape[0] % mesh.shard == 0
            part = spread.part(weight, boxes[first].held[self._rank], is_even=is_even).to(self._target)
            weight.data = part.new_empty(0)
            for name in (first, *others):
                if blanks[name] not in self._parts:
                    self._parts[blanks[name]] = part if name == first else part.clone()
        spread.fill_rest(())  # what else lies in the memory that weights had

    def put(self, unit: nn.Module) -> None:
        """Split a unit, whose weights have no values, over the ranks of FSDP, and put this rank's parts there, in place.

        Every rank that has the unit must call, for units inside it before.
        """
        places = {blank: found for blank, found in _places(unit).items() if blank in self._parts}
        internals.shard(unit, self._layout.data)
        for blank, found in places.items():
            module, name = found[0]
            split = getattr(module, name)
            assert isinstance(split, DTensor), "FSDP splits all weights of a unit"
            local = DTensor.from_local(
                self._parts.pop(blank),
                split.device_mesh,
                split.placements,
                run_check=False,
                shape=split.shape,
                stride=split.stride(),
            )
            _put(nn.Parameter(local, requires_grad=blank.requires_grad), found)
            # FSDP looks for other weights after a state was loaded, and copies parts of unequal length then.
            for module, _ in found:
                module.load_state_dict({}, strict=False, assign=True)


def shard_unit(unit: nn.Module, layout: MeshLayout, own: OwnParts | None) -> None:
    """Split the weights of a unit in place. Every rank must call.

    Args:
        unit: A model or a part of it, whose own units are split already.
        layout: The mesh of the job.
        own: Has this rank's parts of weights that have no values; None: all are whole.
    """
    if own is not None:
        own.put(unit)
    else:
        internals.shard(unit, layout.data)


def _places(unit: nn.Module) -> Places:
    """Return the weights of a unit, and where they are."""
    found: Places = defaultdict(list)
    for module in unit.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            found[weight].append((module, name))
    return dict(found)


def _put(weight: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
    for module, name in places:
        setattr(module, name, weight)
