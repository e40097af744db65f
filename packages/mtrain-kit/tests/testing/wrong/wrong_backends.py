"""Backends that break one promise each, in ways that only whole jobs show."""

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from mtrain.backends.ddp import DDP
from mtrain.core.interfaces import Module, Optimizer, Recipe


class Summing(DDP):
    """Gradients of ranks are summed, not averaged."""

    def __enter__(self) -> Any:
        session: Any = super().__enter__()
        prepare = session.prepare

        def summing(build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
            model, optimizer = prepare(build, recipe)
            backward = optimizer.backward
            optimizer.backward = lambda loss: backward(loss * session.collective.size)
            return model, optimizer

        session.prepare = summing
        return session


class Closed(DDP):
    """No rank gets in."""

    def __enter__(self) -> Any:
        raise RuntimeError("the door is closed")


class Aborting(DDP):
    """A backend whose ranks fail after everything else."""

    def __enter__(self) -> Any:
        atexit.register(os._exit, 7)
        return super().__enter__()


class Alone(DDP):
    """A job of one rank is not thought of."""

    def __enter__(self) -> Any:
        session = super().__enter__()
        assert session.collective.size > 1, "two ranks at least"
        return session


class Hanging(DDP):
    """The last rank never comes to a sum of numpy arrays that is a mean."""

    def __enter__(self) -> Any:
        session = super().__enter__()
        collective: Any = session.collective
        reduce = collective.all_reduce

        def all_reduce(x: Any, op: Any) -> Any:
            if op == "max" and collective.rank == collective.size - 1:
                time.sleep(600)
            return reduce(x, op)

        collective.all_reduce = all_reduce
        return session


class Raising(DDP):
    """One rank fails where it gathers."""

    def __enter__(self) -> Any:
        session = super().__enter__()
        collective: Any = session.collective
        gather = collective.all_gather

        def all_gather(value: Any) -> Any:
            if isinstance(value, dict) and "text" in value and collective.rank == 1:
                raise KeyError("text")
            return gather(value)

        collective.all_gather = all_gather
        return session


class Silent(DDP):
    """No rank ever gets in."""

    def __enter__(self) -> Any:
        time.sleep(600)
        return super().__enter__()


class Stuck(DDP):
    """No rank ever gets out."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        time.sleep(600)


class Incomplete(DDP):
    """Methods of the session are missing."""

    def __enter__(self) -> Any:
        session: Any = super().__enter__()
        session.infer = session.state = None
        return session


class Former(DDP):
    """It is written for the seam on which a backend was its own session."""

    def __enter__(self) -> Any:
        super().__enter__()
        return self


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

    def __enter__(self) -> Any:
        session = super().__enter__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return session

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

    def __enter__(self) -> Any:
        os._exit(0)
