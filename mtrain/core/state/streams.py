"""States that are handed over array by array: make them from sessions and from whole states, join and read them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, Module, Outline, Part, RankSession, State, StateStream
from mtrain.core.state.named_models import rename_entry

PARTS: tuple[Part, ...] = ("weights", "ema", "moments")


def stream_of(session: RankSession, model: Module, optimizer: Any, *, copied: bool) -> StateStream:
    """Return the state as a stream, from a whole one where the session has no other; see ``Capabilities.stream``.

    Every rank must call.
    """
    stream = session.capabilities.stream
    if stream is None:
        return WholeStream(session.state(model, optimizer))
    return stream(model, optimizer, copied=copied)


def of_models(session: RankSession, models: Sequence[tuple[str, Module, Any]], *, copied: bool) -> StateStream:
    """Return the state of models, each with its name and optimizer, as one stream; every rank must call.

    A single model without a name keeps the names of its arrays.
    """
    streams = {name: stream_of(session, model, optimizer, copied=copied) for name, model, optimizer in models}
    return streams[""] if "" in streams else JoinedStream(streams)


class WholeStream:
    """The stream of a state that this rank holds."""

    def __init__(self, state: State) -> None:
        self.counters = state.counters
        self._state = state
        self.outlines: Mapping[Part, Mapping[str, Outline]] = {part: _outlines(getattr(state, part)) for part in PARTS}

    def arrays(self, part: Part, names: Sequence[str]) -> Iterator[Array | None]:
        """See ``StateStream.arrays``; every rank gets the arrays."""
        arrays: Mapping[str, Array] = getattr(self._state, part)
        for name in names:
            yield np.asarray(arrays[name], order="C")


def _outlines(arrays: Mapping[str, Array]) -> dict[str, Outline]:
    return {name: Outline(tuple(array.shape), array.dtype) for name, array in arrays.items()}


class JoinedStream:
    """The streams of several models as one, under the names that ``named_models.join_states`` gives their arrays."""

    def __init__(self, streams: Mapping[str, StateStream]) -> None:
        self.counters = {
            rename_entry("weights", model, name): value
            for model, stream in streams.items()
            for name, value in stream.counters.items()
        }
        self.outlines: Mapping[Part, Mapping[str, Outline]] = {
            part: {
                rename_entry(part, model, name): outline
                for model, stream in streams.items()
                for name, outline in stream.outlines[part].items()
            }
            for part in PARTS
        }
        self._origins = {
            (part, rename_entry(part, model, name)): (stream, name)
            for model, stream in streams.items()
            for part in PARTS
            for name in stream.outlines[part]
        }

    def arrays(self, part: Part, names: Sequence[str]) -> Iterator[Array | None]:
        """See ``StateStream.arrays``."""
        for name in names:
            # One by one: neighbours may be arrays of different models.
            stream, own = self._origins[part, name]
            yield from stream.arrays(part, [own])
