"""The checkpoints of one run: written beside the training loop, kept or dropped by rule, found again when intact.

Rank 0 gets ``Checkpoints``, the other ranks ``NoCheckpoints``: callers need no rank test.
"""

import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mtrain.core.checkpoint import format as files
from mtrain.core.checkpoint.format import Saved, load, progress_of, verify
from mtrain.core.interfaces import Progress, State
from mtrain.errors import TrainingError

__all__ = [
    "CheckpointStore",
    "Checkpoints",
    "NoCheckpoints",
    "Saved",
    "best",
    "listed",
    "load",
    "newest",
    "progress_of",
    "verify",
]

PREFIX = "step-"
TEMPORARY = ".tmp-"
log = logging.getLogger(__name__)


class CheckpointStore(Protocol):
    """What the training loop sees on every rank."""

    waited_s: float
    """Seconds that the loop has waited for an earlier save to end."""

    def save(
        self,
        state: State,
        progress: Progress,
        *,
        score: float | None,
        spec: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        """Write one checkpoint. ``state`` must hold copies: it is read later, by another thread.

        Raises:
            TrainingError: this or an earlier save failed (disk full); earlier checkpoints are intact.
        """
        ...

    def check(self) -> None:
        """Raise what a save that has ended in the meantime could not; costs nothing and waits for nothing."""
        ...

    def wait(self) -> None:
        """Return when nothing is being written. Raises what an earlier ``save`` could not."""
        ...

    def newest(self) -> Path | None:
        """The last one written that is intact; damaged ones are named in a warning and passed over."""
        ...

    def best(self) -> Path | None:
        """The intact one with the highest score; of equal ones the first of the training."""
        ...


class NoCheckpoints:
    """The same methods, no effect: for the ranks that do not write."""

    waited_s = 0.0

    def save(
        self,
        state: State,
        progress: Progress,
        *,
        score: float | None,
        spec: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        """Nothing: rank 0 writes for all."""

    def check(self) -> None:
        """Nothing is written here."""

    def wait(self) -> None:
        """Nothing is under way here."""

    def newest(self) -> Path | None:
        """None: rank 0 knows."""
        return None

    def best(self) -> Path | None:
        """None: rank 0 knows."""
        return None


class Checkpoints:
    """A folder of checkpoints with one writer.

    ``keep_last`` newest and ``keep_best`` best ones stay; at most one save is in flight, a second waits for it.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int, asynchronous: bool) -> None:
        self.folder = Path(folder)
        self.waited_s = 0.0
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._asynchronous = asynchronous
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clean(self.folder)
        self._serial = max((_serial(path) for path in listed(self.folder)), default=0)

    def save(
        self,
        state: State,
        progress: Progress,
        *,
        score: float | None,
        spec: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        """See ``CheckpointStore.save``. The content of ``progress`` is copied at once."""
        self.wait()
        self._serial += 1
        meta = {"score": score, "serial": self._serial, "extra": dict(extra)}
        copied = Progress(**{name: getattr(progress, name) for name in Progress.__dataclass_fields__})
        saved = Saved(state=state, progress=copied, spec=dict(spec), meta=meta)
        if not self._asynchronous:
            self._write(saved)
            self.wait()
            return
        self._writer = threading.Thread(target=self._write, args=(saved,), name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        """See ``CheckpointStore.wait``."""
        if self._writer is not None:
            start = time.perf_counter()
            self._writer.join()
            self.waited_s += time.perf_counter() - start
            self._writer = None
        self.check()

    def check(self) -> None:
        """See ``CheckpointStore.check``."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def newest(self) -> Path | None:
        """See ``CheckpointStore.newest``."""
        return newest(self.folder)

    def best(self) -> Path | None:
        """See ``CheckpointStore.best``."""
        return best(self.folder)

    def _write(self, saved: Saved) -> None:
        name = f"{PREFIX}{saved.progress.update:08d}"
        temporary = self.folder / f"{TEMPORARY}{name}@{socket.gethostname()}@{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            files.write(temporary, saved)
            files.publish(temporary, self.folder / name)
            self._retain(self.folder / name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._error = self._explained(error, name)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._error = error

    def _explained(self, error: OSError, name: str) -> TrainingError:
        good = newest(self.folder)
        kept = f"the last good one is {good}" if good else "there is no earlier one"
        told = TrainingError(
            f"checkpoint {name} could not be written to {self.folder}: {error.strerror or error}; {kept}. "
            "Make room (or set checkpoint.keep_last lower), then go on with --resume"
        )
        told.__cause__ = error
        return told

    def _retain(self, written: Path) -> None:
        """Drop what no rule keeps. ``written`` has just been flushed, so one intact checkpoint always stays."""
        complete = [path for path in listed(self.folder) if looks_whole(path)]
        keep = {written, *complete[-self._keep_last :]}
        keep.update(_by_score(complete)[: self._keep_best])
        for path in complete:
            if path not in keep:
                doomed = path.with_name(f"{TEMPORARY}{path.name}@{socket.gethostname()}@{os.getpid()}.old")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def listed(folder: Path) -> list[Path]:
    """Every checkpoint of ``folder``, damaged ones too, in the order of writing."""
    return sorted(
        (path for path in Path(folder).glob(f"{PREFIX}*") if path.is_dir()), key=lambda p: (_serial(p), p.name)
    )


def newest(folder: Path) -> Path | None:
    """The last intact checkpoint of ``folder``; damaged ones are named in a warning."""
    for path in sorted(listed(folder), key=_order, reverse=True):
        problems = verify(path)
        if not problems:
            return path
        log.warning("checkpoint %s is damaged and passed over: %s", path, "; ".join(problems))
    return None


def best(folder: Path) -> Path | None:
    """The intact checkpoint of ``folder`` with the highest score, of equal ones the first; None: none was scored."""
    return next((path for path in _by_score(listed(folder)) if not verify(path)), None)


def _by_score(paths: Iterable[Path]) -> list[Path]:
    """Those with a score, the highest first.

    Of equal scores the earlier update counts as better, as in ``cadence.scored``: the summary and the best checkpoint
    name the same update.
    """
    scored = [path for path in paths if score_of(path) > -math.inf]
    return sorted(scored, key=lambda path: (-score_of(path), _update(path)))


def _order(path: Path) -> tuple[int, int]:
    """Serial, then update; one without a manifest goes before all so that it is named whatever else is there."""
    manifest = files.manifest_of(path)
    return (1, _serial(path)) if not manifest else (0, _serial(path))


def looks_whole(path: Path) -> bool:
    """Whether every file is there in its size; cheap, for retention and listings."""
    manifest = files.manifest_of(path)
    try:
        return bool(manifest) and all(
            (path / name).stat().st_size == entry["size_bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, KeyError, TypeError, ValueError):
        return False


def score_of(path: Path) -> float:
    """The score it was saved with; -inf: none."""
    try:
        score = float(files.manifest_of(path).get("score"))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return -math.inf
    return -math.inf if math.isnan(score) else score


def _serial(path: Path) -> int:
    serial = files.manifest_of(path).get("serial", 0)
    return serial if isinstance(serial, int) else 0


def _update(path: Path) -> int:
    update = files.manifest_of(path).get("update", 0)
    return update if isinstance(update, int) else 0


def _clean(folder: Path) -> None:
    """Remove what dead writers left. The names say host and process; another host's are left alone."""
    for path in folder.glob(f"{TEMPORARY}*.former"):  # killed between the two renames of ``publish``
        final = folder / path.name.removeprefix(TEMPORARY).partition("@")[0]
        if not final.exists():
            path.rename(final)
    for path in folder.glob(f"{TEMPORARY}*"):
        _, _, rest = path.name.partition("@")
        host, _, process = rest.partition("@")
        number = process.split(".")[0]
        if host == socket.gethostname() and (
            not number.isdigit() or int(number) == os.getpid() or not _alive(int(number))
        ):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
