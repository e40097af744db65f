"""Backends that break one promise each, in ways that only whole jobs show."""

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from mtrain.backends.ddp import DDP
from mtrain.core.interfaces import Module, Optimizer, Recipe


class Summing(DDP):
    """Gradients of ranks are summed, not averaged."""

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        model, optimizer = super().prepare(build, recipe)
        averaged: Any = optimizer
        backward = averaged.backward
        averaged.backward = lambda loss: backward(loss * self.collective.size)
        return model, optimizer


class Closed(DDP):
    """No rank gets in."""

    def __enter__(self) -> Self:
        raise RuntimeError("the door is closed")


class Aborting(DDP):
    """A backend whose ranks fail after everything else."""

    def __enter__(self) -> Self:
        atexit.register(os._exit, 7)
        return super().__enter__()


class Alone(DDP):
    """A job of one rank is not thought of."""

    def __enter__(self) -> Self:
        super().__enter__()
        assert self.collective.size > 1, "two ranks at least"
        return self


class Hanging(DDP):
    """The last rank never comes to a sum of numpy arrays that is a mean."""

    def __enter__(self) -> Self:
        super().__enter__()
        collective: Any = self.collective
        reduce = collective.all_reduce

        def all_reduce(x: Any, op: Any) -> Any:
            if op == "max" and collective.rank == collective.size - 1:
                time.sleep(600)
            return reduce(x, op)

        collective.all_reduce = all_reduce
        return self


class Raising(DDP):
    """One rank fails where it gathers."""

    def __enter__(self) -> Self:
        super().__enter__()
        collective: Any = self.collective
        gather = collective.all_gather

        def all_gather(value: Any) -> Any:
            if isinstance(value, dict) and "text" in value and collective.rank == 1:
                raise KeyError("text")
            return gather(value)

        collective.all_gather = all_gather
        return self


class Silent(DDP):
    """No rank ever gets in."""

    def __enter__(self) -> Self:
        time.sleep(600)
        return super().__enter__()


class Stuck(DDP):
    """No rank ever gets out."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        time.sleep(600)


class Incomplete(DDP):
    """Methods are missing."""

    infer: Any = None
    state: Any = None


class Nameless(DDP):
    """It does not say what its starter must provide."""

    rendezvous: Any = None


class Staying(DDP):
    """A backend that leaves a thread and a process running."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
        subprocess.Popen(["sleep", "30"], start_new_session=True)


class Lingering(DDP):
    """Ranks do not end when they are asked to, and wait for those that are gone."""

    def __enter__(self) -> Self:
        super().__enter__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            time.sleep(300)
            os._exit(0)
        super().__exit__(*error)


class Broken(DDP):
    """It cannot even be constructed."""

    def __init__(self, options: DDP.Options) -> None:
        raise ValueError("no use")


class Quitting(DDP):
    """Its ranks end before they meet, as if all were well."""

    def __enter__(self) -> Self:
        os._exit(0)
