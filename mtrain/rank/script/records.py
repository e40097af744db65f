"""The reports, checkpoints and summary of a script's job. Rank 0 writes them; the other ranks call the same methods."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Backend, Progress, RankSession, Why
from mtrain.core.record_files import RESULTS
from mtrain.core.samples import resumed_samples
from mtrain.errors import ScriptError
from mtrain.rank import copying
from mtrain.rank.records import RANDOM_SHARDS, TrainingRecords, describe_run, report_of
from mtrain.rank.script import pictures
from mtrain.rank.script.job import RankJob, digest_of
from mtrain.rank.script.kept import KeptObjects, as_plain, from_plain
from mtrain.rank.script.settings import describe_script
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
        states = None if saved is None else saved.meta["extra"].get("kept", {})
        self.kept = KeptObjects(rank.collective, states, self._tensor, warn=partial(self.report.event, "warning"))
        self.training = TrainingRecords(job.spec, job.run_folder, rank, self.report, saved)
        copying.catch_up(self.training.copies, job.run_folder)

    def _report(self, reporters: Sequence[Any]) -> Report:
        """Return the report of this rank, with the display of its process and the script's own ``reporters``."""
        saved, job = self._saved, self._job
        run = describe_run(
            job.spec,
            job.run_folder,
            self._rank.collective,
            start_update=0 if saved is None else saved.progress.update,
        )
        shown = [] if job.display is None else [("display", job.display)]
        return report_of(job.resolved, run, [*shown, *of_objects(reporters, run)])

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
        extra = {
            "kept": self.kept.states(),
            "stream": None if stream is None else as_plain(stream, name="the stream"),
            "script": script_mark(),
            resumed_samples.KEY: resumed_samples.facts(count=self._samples),
            RANDOM_SHARDS: self.shards,
            "results": {"best": self._best, "last": self._last},
            **self.further,
        }
        content = {"spec": describe_script(without_places(spec.model_dump(mode="json"))), "extra": extra}
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
