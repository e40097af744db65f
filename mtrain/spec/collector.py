"""Python's cyclic garbage collector, kept from work that leaves no garbage."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_OF_A_COLLECTION = 10_000
"""New objects after which the collector runs in a process of mtrain's own; Python's default is 700."""


@contextmanager
def pause() -> Iterator[None]:
    """Keep the collector from running meanwhile."""
    # Importing modules and drawing figures makes hundreds of thousands of objects that stay. They
    # start the collector again and again, and it walks through all of them each time: with the walk
    # at Python's end, a third of the CPU time of a process that imports torch and does nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_all() -> None:
    """Exempt the objects that exist now from collection, to the end of this process and at its end.

    For a process of mtrain's own, before code of users has run.
    """
    # What somebody drops later is freed all the same, unless it is part of
    # a cycle; and a file in a cycle would not be flushed when Python ends.
    gc.freeze()


def run_seldom() -> None:
    """Let the collector run seldom in this process, which is a command of mtrain's own, and not at its end."""
    gc.set_threshold(OBJECTS_OF_A_COLLECTION)
    atexit.register(gc.freeze)
