"""Trace a training for ``mtrain compare``, as ``report.trace`` asks: fields for its records."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.core.interfaces import HostBatch, Loader, RankSession, State
from mtrain.core.state.named_models import models_in
from mtrain.core.state.trace import Shares, Tracer, traffic


class Tracing:
    """The trace of a training. Every rank must call its methods, except ``saw`` and ``watch``."""

    def __init__(
        self,
        wanted: str,
        rank: RankSession,
        groups: Sequence[Sequence[str]],
        state: Callable[[], State],
        *,
        accumulate: int,
        readers: Sequence[int] | None = None,
    ) -> None:
        """``wanted``: the setting ``report.trace``; the others: see ``Tracer``."""
        self._wanted = wanted
        self._rank = rank
        self._groups = groups
        self._shares = Shares()
        self._tracer: Tracer | None = None
        # "traffic" counts bytes alone: looking at the state after each update would change the time that is measured.
        if wanted == "state":
            self._tracer = Tracer(rank.collective, groups, state, accumulate=accumulate, readers=readers)

    def watch(self, loader: Loader, *, decided: list[Any] | None = None) -> Loader:
        """Return a loader of which this rank's micro batches are noted; ``decided``: see ``Tracer.watch``."""
        return loader if self._tracer is None else self._tracer.watch(loader, decided=decided)

    def saw(self, batch: HostBatch) -> None:
        """Take note of this rank's next micro batch, where no loader is watched."""
        if self._tracer is not None:
            self._tracer.saw(batch)

    def saw_more(self, batch: HostBatch) -> None:
        """Take note of further arrays of the micro batch that was seen last."""
        if self._tracer is not None:
            self._tracer.saw_more(batch)

    def start(self) -> dict[str, Any]:
        """Return the fields for the first record; ``models``: of several, that of each parameter group; ``names``: its weights."""
        if self._tracer is None:
            return {}
        models = [(models_in(names) or [""])[0] for names in self._groups]
        names = [list(names) for names in self._groups]
        return {"trace": {**self._tracer.look(), "models": models if any(models) else [], "names": names}}

    def fields_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields for the record of an update."""
        self._shares.take(record)
        if self._wanted == "none":
            return {}
        return {**traffic(), **({} if self._tracer is None else {"trace": self._tracer.after_update()})}

    def measure_ranks(self) -> list[dict[str, float]]:
        """Return what each rank has measured, by rank."""
        mine = {**self._rank.measure(), **self._shares.summary()}
        everyone: list[dict[str, float]] = self._rank.collective.all_gather(mine)
        return everyone
