"""Backends that train wrongly, each in one thing."""

import copy
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


class Wrong:
    """A backend whose session calls ``preparing`` of the backend in place of its own ``prepare``."""

    def __enter__(self) -> Any:
        session: Any = super().__enter__()  # type: ignore[misc]
        prepare = session.prepare
        session.prepare = lambda build, recipe: self.preparing(session, prepare, build, recipe)
        return session

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        """Call ``prepare``, with something wrong."""
        raise NotImplementedError


class Clipping(Wrong, Solo):
    """A backend that clips at 0.25 regardless of the recipe."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        return prepare(build, replace(recipe, clip_norm=0.25))


class Summing(Wrong, Solo):
    """Adds the gradients of the micro batches up instead of averaging them."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        model, optimizer = prepare(build, recipe)
        average = optimizer.backward
        optimizer.backward = lambda loss: average(loss * recipe.accumulate)
        return model, optimizer


class Sluggish(Wrong, Solo):
    """Has another momentum."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        groups = tuple((match, {**options, "momentum": 0.5}) for match, options in recipe.groups)
        return prepare(build, replace(recipe, groups=groups))


class Elsewhere(Solo):
    """Needs a library that nobody has."""


class Silent(Wrong, DDP):
    """Never exchanges gradients."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        model, optimizer = prepare(build, recipe)
        exchange = optimizer.micro_batch
        optimizer.micro_batch = lambda *, last: exchange(last=False)
        return model, optimizer


class Untaught(Wrong, Solo):
    """Trains a copy of the network that the job has built, so the teacher that the job gives to that is lost."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        return prepare(lambda: copy.deepcopy(build()), recipe)


class Unmasked(Wrong, Solo):
    """Sets no weight to 0."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        return prepare(build, replace(recipe, prune=None))


class Late(Wrong):
    """Rank 1 is late in every backward pass, by six times as long as its forward pass took."""

    def preparing(self, session: Any, prepare: Any, build: Any, recipe: Any) -> Any:
        model, optimizer = prepare(build, recipe)
        if session.collective.rank == 1:
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
