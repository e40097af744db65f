"""Random numbers that are a script's own: nothing seeds them between its batches, and checkpoints keep where they are."""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mtrain.errors import ScriptError


class OwnDraws:
    """The global generators of Python, numpy and torch, as a script leaves them."""

    def __init__(self, framework: str) -> None:
        """``framework``: of the job.

        Raises:
            ScriptError: it is none whose generators can be put back.
        """
        if framework != "torch":
            raise ScriptError(f"mtrain.session: reseed=False given with {framework}; it is for backends on torch")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        torch = sys.modules["torch"]
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the generators back."""
        torch = sys.modules["torch"]
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])

    @contextmanager
    def keep_draws(self) -> Iterator[None]:
        """Return a context after which the generators are where they were before it."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)
