"""The reports, checkpoints and summary of a script's job. Rank 0 writes them; the other ranks call the same methods."""

import base64
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Array, Backend, Collective, Progress, RankSession, Why
from mtrain.core.record_files import RESULTS
from mtrain.core.samples import resumed_samples
from mtrain.data import trees
from mtrain.errors import CheckpointError, ScriptError
from mtrain.rank import copying
from mtrain.rank.records import RANDOM_SHARDS, TrainingRecords, report_of, reported_run
from mtrain.rank.script import pictures
from mtrain.rank.script.job import RankJob, digest_of
from mtrain.rank.script.settings import described_script
from mtrain.records.adapted import of_objects
from mtrain.records.reporter import Report
from mtrain.spec.disclosure import without_places


class ScriptRecords:
    """The reports, checkpoints and kept objects of a script's job."""

    def __init__(
        self,
        job: RankJob,
        backend: Backend,
        rank: RankSession,
        saved: store.Saved | None,
        *,
        reporters: Sequence[Any] = (),
    ) -> None:
        self._job = job
        self._backend = backend
        self._rank = rank
        self._saved = saved
        self._started = time.perf_counter()
        self._kept: dict[str, Any] = {}
        self._warned_of_zero = False
        self._names: list[str] = []
        """Names under which the next checkpoint is kept."""
        metrics = {} if saved is None else saved.meta["extra"].get("results", {})
        self._best: dict[str, Any] = dict(metrics.get("best", {}))
        self._last: dict[str, Any] = dict(metrics.get("last", {}))
        self.shards = 1
        """Number of parts of an update that draw random numbers of their own."""
        self.choices: Sequence[tuple[str, str]] = ()
        """Messages about what was chosen for ``auto``: (kind, sentence)."""
        self._samples: int | None = None
        self.further: Mapping[str, Any] = {}
        """Plain values of the loop's own that the next checkpoints hold."""
        self.report = self._report(reporters)
        self.training = TrainingRecords(job.spec, job.run_folder, rank, self.report, saved)
        copying.catch_up(self.training.copies, job.run_folder)

    def _report(self, reporters: Sequence[Any]) -> Report:
        """Return the report of this rank, with the display of its process and the script's own ``reporters``."""
        saved, job = self._saved, self._job
        run = reported_run(
            job.spec,
            job.run_folder,
            self._rank.collective,
            start_update=0 if saved is None else saved.progress.update,
        )
        shown = [] if job.display is None else [("display", job.display)]
        return report_of(job.resolved, run, [*shown, *of_objects(reporters, run)])

    # -------------------------------------------------------------------------------------------------- kept objects
    def keep(self, name: str, kept_object: Any) -> None:
        """See ``Session.keep``."""
        if not (hasattr(kept_object, "state_dict") and hasattr(kept_object, "load_state_dict")):
            raise ScriptError(
                f"session.keep({name!r}): an object of type {type(kept_object).__name__} has no state_dict() and "
                "load_state_dict(state); give it both"
            )
        if name in self._kept:
            raise ScriptError(f"session.keep({name!r}): this name is taken; give each object a name of its own")
        as_plain(kept_object.state_dict(), name=name)
        self._kept[name] = kept_object
        if self._saved is None:
            return
        states = self._saved.meta["extra"].get("kept", {})
        if name not in states:
            raise CheckpointError(
                f"session.keep({name!r}): the checkpoint has no state of that name; it has {', '.join(states) or 'none'}. "
                "Start a new run, or use the name of the script that wrote it"
            )
        kept_object.load_state_dict(from_plain(states[name], self._tensor))

    def _tensor(self, array: Any) -> Any:
        """Return an array as a tensor of this rank's framework, on its device."""
        return next(iter(self._rank.batches([{"value": array}])))["value"]

    # --------------------------------------------------------------------------------------------------- the records
    def announce(self, spec: Any, fields: Mapping[str, Any]) -> None:
        """Write the first record, which says what is about to be trained; every rank must call.

        ``fields``: those of the record, among them ``train_samples``.
        """
        self._samples = fields["train_samples"]
        self.training.start(self._backend, resume=self._job.resume, fields=fields)
        if self._saved is not None and self._saved.meta["extra"].get("script") != script_mark():
            self.report.event("warning", message="the script has changed since the checkpoint was written")
        for kind, sentence in self.choices:
            self.report.event(kind, message=sentence)
        self.training.report_changes(spec, shards=self.shards)

    def report_update(self, record: Mapping[str, Any]) -> None:
        """Report the record of one update, with a warning if the update was skipped or changed nothing."""
        self.training.report_update(record)
        if record["gradient_norm"] == 0 and not self._warned_of_zero:
            self._warned_of_zero = True
            self.report.event(
                "warning",
                message=f"update {record['update']}: the gradient is zero; check that the loss is computed from the model that "
                "session.prepare returned",
            )

    def report_evaluation(
        self, metrics: Mapping[str, float], *, update: int, epoch: int, score: str | None, seconds: float
    ) -> float | None:
        """Report an evaluation. Return its score if it is the best so far, else None.

        Raises:
            ScriptError: there is no metric of the name ``score``.
        """
        self.training.exclude_waits()
        name = score or ("score" if "score" in metrics else None)
        sign = -1 if name is not None and name.startswith("-") else 1
        name = None if name is None else name.removeprefix("-")
        if name is not None and name not in metrics:
            raise ScriptError(f"session.evaluate: score={score!r} given, the metric has {', '.join(metrics)}")
        self._last = {"update": update, "epoch": epoch, **metrics}
        best = name is not None and sign * metrics[name] > sign * self._best.get(name, -sign * math.inf)
        if best:
            self._best = self._last
        self.report.evaluation(
            metrics, update=update, epoch=epoch, headline=list(metrics)[:3], best=best, seconds=seconds
        )
        return sign * metrics[name] if best and name is not None else None

    @property
    def best(self) -> Mapping[str, Any]:
        """The evaluation with the best score: its metrics, ``update`` and ``epoch``; empty before the first."""
        return self._best

    def saved_stream(self) -> Any:
        """Return the state of the stream in the checkpoint that is resumed; None: it has none."""
        assert self._saved is not None
        state = self._saved.meta["extra"].get("stream")
        return None if state is None else from_plain(state, self._tensor)

    def save(self, state: Any, progress: Progress, *, score: float | None, why: Why, spec: Any, stream: Any) -> None:
        """Write a checkpoint in the background; ``stream``: state of the stream that is read, None where it has none."""
        # At once and not in the background: the script goes on to change what it keeps.
        states = {name: as_plain(item.state_dict(), name=name) for name, item in self._kept.items()}
        check_alike(states, self._rank.collective)
        extra = {
            "kept": states,
            "stream": None if stream is None else as_plain(stream, name="the stream"),
            "script": script_mark(),
            resumed_samples.KEY: resumed_samples.facts(count=self._samples),
            RANDOM_SHARDS: self.shards,
            "results": {"best": self._best, "last": self._last},
            **self.further,
        }
        content = {"spec": described_script(without_places(spec.model_dump(mode="json"))), "extra": extra}
        names, self._names = self._names, []
        self.training.save(state, progress, score=score, why=why, content=content, names=names)

    def keep_next(self, name: str) -> None:
        """Keep the next checkpoint under a name, too.

        Raises:
            ScriptError: it cannot be the name of a checkpoint.
        """
        if not isinstance(name, str) or not store.is_kept_name(name):
            raise ScriptError(
                f"session.save({name!r}): expected a name of letters, digits, '.', '_' and '-', such as 'warm', that does not begin with "
                f"{store.PREFIX!r}"
            )
        if name not in self._names:
            self._names.append(name)

    def image(self, name: str, picture: Any, *, update: int) -> None:
        """See ``Session.image``."""
        if self._rank.collective.rank == 0:
            file = pictures.write(self._job.run_folder.path, name, picture, update=update)
            self.report.event("image", name=name, update=update, file=file)

    def histogram(self, name: str, values: Any, *, bins: int, update: int) -> None:
        """See ``Session.histogram``."""
        if self._rank.collective.rank == 0:
            counts, edges = pictures.count_values(name, values, bins=bins)
            self.report.event("histogram", name=name, update=update, counts=counts, edges=edges)

    def end(
        self,
        reason: str,
        progress: Progress,
        *,
        spec: Any,
        total_updates: int | None,
        stepped: Sequence[tuple[str, Any, Any]] | None,
        measured: Sequence[Mapping[str, float]] | None,
    ) -> None:
        """Write the last record and the summary.

        ``stepped``: models and optimizers, see ``TrainingRecords.stream``; None: the job did not get to its end.
        ``measured``: measurements by rank.
        """
        self.training.settle(reason, stop=self._job.stop)
        not_done = [RESULTS] if spec.report.plots else []
        summary: dict[str, Any] = {
            **self.training.summary(reason, progress, total_updates=total_updates, not_done=not_done),
            "seconds": round(time.perf_counter() - self._started, 2),
            "best": self._best,
            "last": self._last,
            "headline": [name for name in self._last if name not in ("update", "epoch")][:3],
        }
        if stepped is not None:
            summary |= {"measured": measured, **self.training.result(*stepped)}
        self.training.end(reason, summary)


def script_mark() -> str | None:
    """Return the digest of the running script; None where there is no file, as in a notebook."""
    try:
        return digest_of(Path(sys.argv[0]))
    except OSError:
        return None


LARGEST_BYTES = 16 * 1024 * 1024
"""Largest array that is kept. Larger state belongs into the model, whose arrays are stored in a format of their own."""
TAKEN = "numbers, text, None, arrays, tensors, and lists, tuples and dicts of these"
"""What a kept state may hold, for messages."""


def as_plain(value: Any, *, name: str) -> Any:
    """Return the result of a ``state_dict`` as values that JSON can hold.

    Raises:
        ScriptError: it holds something else than numbers, text, arrays and containers of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[as_plain(key, name=name), as_plain(item, name=name)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [as_plain(item, name=name) for item in value]}
    array = trees.as_array(value)
    if array is None or array.dtype == object:
        raise ScriptError(f"session.keep({name!r}): its state_dict() holds a {type(value).__name__}; expected {TAKEN}")
    if array.nbytes > LARGEST_BYTES:
        raise ScriptError(
            f"session.keep({name!r}): its state_dict() holds an array of {array.nbytes / 2**20:.0f} MiB; at most "
            f"{LARGEST_BYTES >> 20} MiB are kept: make it a buffer of the model"
        )
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    kind = "numpy" if isinstance(value, np.ndarray) else "scalar" if isinstance(value, np.generic) else "tensor"
    return {
        "array": [array.dtype.str, list(array.shape), content],
        "tensor": kind == "tensor",
        "scalar": kind == "scalar",
    }


def from_plain(value: Any, tensor: Callable[[Array], Any]) -> Any:
    """Return the value from which ``as_plain`` made ``value``; ``tensor`` turns an array into a tensor."""
    if not isinstance(value, Mapping):
        return value
    if "dict" in value:
        return {from_plain(key, tensor): from_plain(item, tensor) for key, item in value["dict"]}
    if "array" in value:
        dtype, shape, content = value["array"]
        array = np.frombuffer(base64.b64decode(content), dtype=np.dtype(dtype)).reshape(shape).copy()
        if value.get("scalar"):
            return array[()]
        return tensor(array) if value["tensor"] else array
    if "tuple" in value:
        return tuple(from_plain(item, tensor) for item in value["tuple"])
    return [from_plain(item, tensor) for item in value["list"]]


def check_alike(states: Mapping[str, Any], collective: Collective) -> None:
    """Refuse plain states that are not those of rank 0, which alone are saved; every rank must call.

    Raises:
        ScriptError: A rank has another state than rank 0, or one that rank 0 does not have; raised on every rank.
    """
    if collective.size == 1:
        return
    # Digests and not the states: they are gathered from all ranks at each save.
    own = {name: hashlib.sha256(json.dumps(state).encode()).digest() for name, state in states.items()}
    first, *others = collective.all_gather(own)
    for rank, digests in enumerate(others, 1):
        for name in (name for name, digest in digests.items() if first.get(name) != digest):
            differs = "differs from that of rank 0" if name in first else "is kept, and rank 0 keeps none"
            raise ScriptError(
                f"session.keep: the state of {name!r} on rank {rank} {differs}, but a checkpoint holds that of rank 0 alone, for all "
                "ranks; keep what is equal on all ranks, and make what belongs to a rank's samples anew when the job is resumed"
            )
