"""Backends that train wrongly, each in one thing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mtrain.backends.ddp import DDP
from mtrain.backends.deepspeed import DeepSpeed
from mtrain.backends.fleet import Fleet
from mtrain.backends.horovod import Horovod
from mtrain.backends.solo import Solo


class Clipping(Solo):
    """A backend that clips at 0.25 regardless of the recipe."""

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


class Late:
    """Rank 1 is late in every backward pass, by six times as long as its forward pass took."""

    def prepare(self, build: Any, recipe: Any) -> Any:
        model, optimizer = super().prepare(build, recipe)
        if self.collective.rank == 1:
            forward, backward = optimizer.micro_batch, optimizer.backward
            start_times: list[float] = []

            @contextmanager
            def micro_batch(*, last: bool) -> Iterator[None]:
                with forward(last=last):
                    start_times[:] = [time.perf_counter()]
                    yield

            def late(loss: Any) -> None:
                time.sleep(max(0.05, 6 * (time.perf_counter() - start_times[0])))
                backward(loss)

            optimizer.micro_batch, optimizer.backward = micro_batch, late
        return model, optimizer


class LateDDP(Late, DDP):
    """See ``Late``."""


class LateHorovod(Late, Horovod):
    """See ``Late``."""


class LateDeepSpeed(Late, DeepSpeed):
    """See ``Late``."""


class LateFleet(Late, Fleet):
    """See ``Late``."""


class Broken(Solo):
    """Cannot be made."""

    def __init__(self, options: Any) -> None:
        raise RuntimeError("no such device")
