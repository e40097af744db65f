"""Backends that train wrongly, each in one thing."""

from dataclasses import replace
from typing import Any

from mtrain.backends.ddp import DDP
from mtrain.backends.solo import Solo


class Clipping(Solo):
    """Clips at 0.25, whatever the recipe says."""

    def prepare(self, build: Any, recipe: Any) -> Any:
        return super().prepare(build, replace(recipe, clip_norm=0.25))


class Summing(Solo):
    """Adds the gradients of the micro batches up instead of averaging them."""

    def prepare(self, build: Any, recipe: Any) -> Any:
        model, optimizer = super().prepare(build, recipe)
        average = optimizer.backward
        optimizer.backward = lambda loss: average(loss * recipe.accumulate)
        return model, optimizer


class Sluggish(Solo):
    """Has another momentum."""

    def prepare(self, build: Any, recipe: Any) -> Any:
        groups = tuple((match, {**options, "momentum": 0.5}) for match, options in recipe.groups)
        return super().prepare(build, replace(recipe, groups=groups))


class Elsewhere(Solo):
    """Needs a library that nobody has."""


class Silent(DDP):
    """Never exchanges gradients."""

    def prepare(self, build: Any, recipe: Any) -> Any:
        model, optimizer = super().prepare(build, recipe)
        exchange = optimizer.micro_batch
        optimizer.micro_batch = lambda *, last: exchange(last=False)
        return model, optimizer
