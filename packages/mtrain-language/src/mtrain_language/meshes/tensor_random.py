"""Random numbers of the ranks of a tensor group: equal outside of the layers that they share, different inside.

Ranks of a group have the same samples and the same seed. What each of them computes alone, such as its heads of an
attention, must drop elements independently of the others; what all of them compute alike must drop the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from mtrain_language.meshes.tensor_adapters import dropouts, layer_of
from mtrain_language.meshes.tensor_plan import Style


class _Region:
    """From the output of the first layer that is cut by columns to the input of the one that is cut by rows."""

    def __init__(self, place: int, device: torch.device) -> None:
        self._place = place
        self._on_cuda = device.type == "cuda"
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def begin(self, *_: Any) -> None:
        """Forget a region that was left before its end, as when a checkpointed block stops early."""
        self._outside = None

    def enter(self, *_: Any) -> None:
        """Go on with a stream of this rank's own, which follows from the common one; that moves on by one number."""
        if self._outside is None:
            drawn = int(torch.randint(2**62, ()))
            self._outside = torch.get_rng_state(), torch.cuda.get_rng_state() if self._on_cuda else None
            words = np.random.SeedSequence([drawn, self._place]).generate_state(2)
            seed = int(words[0]) << 31 | int(words[1]) >> 1
            torch.default_generator.manual_seed(seed)
            if self._on_cuda:
                torch.cuda.manual_seed(seed)

    def leave(self, *_: Any) -> None:
        """Go on with the common stream."""
        if self._outside is not None:
            on_host, on_device = self._outside
            self._outside = None
            torch.set_rng_state(on_host)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device)


def separate(model: nn.Module, plan: Mapping[str, Style], *, place: int, device: torch.device) -> None:
    """Give each rank of a tensor group random numbers of its own in what it computes alone; in place.

    Args:
        model: The model, whose layers are shared.
        plan: Styles of these by name.
        place: This rank's place in its group.
        device: This rank's device.
    """
    if not _drops(model):
        return
    cut = {layer_of(name): style for name, style in plan.items() if style in ("colwise", "rowwise")}
    for parent in {name.rpartition(".")[0] for name in cut}:
        within = {name: style for name, style in cut.items() if name.rpartition(".")[0] == parent}
        if len(set(within.values())) < 2:
            continue
        region = _Region(place, device)
        model.get_submodule(parent).register_forward_pre_hook(region.begin)
        for name, style in within.items():
            layer = model.get_submodule(name)
            _enter_behind(layer, region) if style == "colwise" else _leave_before(layer, region)


def _enter_behind(layer: nn.Module, region: _Region) -> None:
    """Enter behind a layer that is cut by columns; its adapters drop what every rank of the group has, so alike."""
    layer.register_forward_hook(region.enter)
    for dropout in dropouts(layer):
        dropout.register_forward_pre_hook(region.leave)


def _leave_before(layer: nn.Module, region: _Region) -> None:
    """Leave before a layer that is cut by rows; its adapters drop what this rank alone has, so as inside."""
    inside = dropouts(layer)
    for dropout in inside:
        dropout.register_forward_hook(region.leave)
    if not inside:
        layer.register_forward_pre_hook(region.leave)


def _drops(model: nn.Module) -> bool:
    """Return whether the model drops elements while it is trained."""
    config = getattr(model, "config", None)
    settings = vars(config) if config is not None else {}
    named = (value for key, value in settings.items() if "dropout" in key or key.endswith("pdrop"))
    return any(isinstance(value, float | int) and value > 0 for value in named) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
    )
