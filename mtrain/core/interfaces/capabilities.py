"""What only some sessions can do."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mtrain.core.interfaces.state import StateStream
from mtrain.core.interfaces.tensors import Module

Prepared: TypeAlias = tuple[Module, Any]
"""A model and its optimizer, as ``RankSession.prepare`` has returned them."""
Follow: TypeAlias = Callable[[Prepared, Prepared, float, bool], None]
"""Moves the weights of a model that is not trained towards those of another one: (target, source, share, whether buffers are
copied)."""


class StreamState(Protocol):
    """Returns the state of a model and its optimizer as a stream; see ``Capabilities.stream``."""

    def __call__(self, model: Module, optimizer: Any, *, copied: bool) -> StateStream:
        """Return the stream; every rank must call.

        ``copied``: what this rank contributes is copied first, so that training may go on while another thread reads the
        stream. Else nothing is copied, and nothing may change before the stream is read.
        """
        ...


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a session can do beyond what every session must; each default is that of a session that cannot."""

    late: bool = False
    """Whether the trainer is to read the metrics of an update one update later (``Optimizer.step_later``), so that it
    does not wait for the device in mid-update. Known once ``prepare`` was called."""
    fast_bf16: bool = False
    """Whether this rank's device computes bf16 faster than fp32, for ``train.precision: auto``."""
    seed: Callable[[int], None] = _nothing
    """Seeds the framework's random generators of this rank: before a user's sample is read, and before each micro batch of a
    user's module."""
    time_waits: Callable[[], None] = _nothing
    """Measures from now on how long this rank waits for others; see ``RankSession.measure``.

    It is called before ``prepare``, and only if a comparison or ``report.metrics_port`` needs it.
    """
    profile: Callable[[Path], AbstractContextManager[None]] | None = None
    """Records what this rank and its device compute within the context, and then writes it into a file, in the format of
    Chrome's traces. None: the session records no profile."""
    own_order: bool = False
    """Whether ``Recipe.own_order`` can be followed, and so more than one model trained."""
    follow: Follow | None = None
    """What ``session.follow`` of a script calls. Every rank must call. None: the session cannot."""
    stream: StreamState | None = None
    """Returns what ``RankSession.state`` returns, array by array and on rank 0 alone. None: the session holds whole states
    only; ``core.state.streams.stream_of`` then makes a stream of one. One stream is read at a time."""
