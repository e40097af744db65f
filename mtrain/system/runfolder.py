"""The folder of one run: what lies where, and how a new one gets its name.

::

    runs/<name>/  spec.json spec.yml plan.json plan.txt environment.json     what was asked for (starter)
                  spec.1.yml spec.2.yml ...                                  the same before it was resumed with changes
                  metrics.jsonl summary.json results.png val_batch.jpg tensorboard/   what happened (rank 0)
                  checkpoints/  logs/rank-N.log logs/starter.log  failures/rank-N.json
    runs/latest   link to the newest
"""

import fcntl
import glob
import itertools
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mtrain.errors import CheckpointError, MtrainError, TrainingError, UsageError
from mtrain.files import parse_json, read_bytes
from mtrain.report.reporter import METRICS, RESULTS, SUMMARY, write_json

MAX_FAILURE_BYTES = 64 << 20
"""Largest file of a failed rank that is read."""

LATEST = "latest"
ASKED = ("spec.json", "spec.yml", "plan.txt", "plan.json", "environment.json")
"""Files of a run folder that say what was asked for."""


def keep_private() -> None:
    """Let everything that this process and its children create be readable by its owner alone, whoever writes it.

    Frameworks, their starters and libraries write files too: only the mask of the process reaches them all.
    """
    os.umask(0o077)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; making the object touches nothing."""

    path: Path
    log_dir: Path | None = None
    """``cluster.log_dir``; None: ``logs`` in the folder."""
    node: int | None = None
    """Which of several hosts this is, for files of which each host writes its own; None: the only one."""

    @property
    def spec_json(self) -> Path:
        """The resolved spec, as the ranks read it."""
        return self.path / "spec.json"

    @property
    def spec_yml(self) -> Path:
        """The resolved spec, as a person reads it."""
        return self.path / "spec.yml"

    @property
    def spec_to_read(self) -> Path:
        """The resolved spec of the job that is starting: of a resumed one it waits beside the run's own."""
        waiting = pending(self.spec_json)
        return waiting if waiting.exists() else self.spec_json

    @property
    def metrics(self) -> Path:
        """Records of the run, one JSON object per line."""
        return self.path / METRICS

    @property
    def summary(self) -> Path:
        """Result of the run."""
        return self.path / SUMMARY

    @property
    def results(self) -> Path:
        """The curves."""
        return self.path / RESULTS

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        """Folder of what ranks wrote when they failed."""
        return self.path / "failures"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.log_dir or self.path / "logs"

    @property
    def starter_log(self) -> Path:
        """Output of the command that the starter ran."""
        return self.logs / ("starter.log" if self.node is None else f"host-{self.node}.log")

    def rank_log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_logs(self, ranks: range | None = None) -> dict[int, Path]:
        """The logs of ``ranks`` that are there; None: of all."""
        numbers = (path.stem.removeprefix("rank-") for path in self.logs.glob("rank-*.log"))
        found = sorted(int(number) for number in numbers if number.isdigit())
        return {rank: self.rank_log(rank) for rank in found if ranks is None or rank in ranks}

    def make(self) -> None:
        """Create the folders, readable by their owner alone."""
        for folder in (self.path, self.checkpoints, self.failures, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


# ------------------------------------------------------------------------------------------------- what was asked for
def pending(path: Path) -> Path:
    """Where a resumed job's version of ``path`` waits (``spec.next.yml``) until its ranks have restored the checkpoint."""
    return path.with_name(f"{path.stem}.next{path.suffix}")


def adopt(run: RunFolder) -> None:
    """Make what a resumed job was asked for the run's own. Called by rank 0 once the job has restored.

    A spec that differs from the one before leaves that one beside it, as ``spec.1.yml``, ``spec.2.yml`` ...

    Raises:
        TrainingError: the folder cannot be written to.
    """
    try:
        for name in ASKED:
            path = run.path / name
            new = pending(path)
            if not new.exists():
                continue
            if path == run.spec_yml and path.exists() and path.read_bytes() != new.read_bytes():
                _keep_earlier(path)
            new.replace(path)
    except OSError as error:
        raise TrainingError(f"{run.path}: the new spec cannot be put there: {error.strerror or error}") from error


def _keep_earlier(spec: Path) -> None:
    """Copy ``spec`` to its next free number; it stays in its place until the new one replaces it."""
    numbered = (spec.with_name(f"{spec.stem}.{count}{spec.suffix}") for count in itertools.count(1))
    free = next(path for path in numbered if not path.exists())
    temporary = free.with_name(f".{free.name}.{os.getpid()}")
    shutil.copy2(spec, temporary)
    temporary.replace(free)


# -------------------------------------------------------------------------------------------------------------- names
def next_name(base: Path, name: str) -> Path:
    """The folder that ``create`` would make now: ``name``, or ``name-2`` ... when taken. Touches nothing."""
    return next(path for path in _candidates(base, name) if not path.exists())


def create(base: Path, name: str, *, latest: bool = True) -> Path:
    """Make a new run folder and point ``latest`` to it if asked; safe when two jobs start at once.

    Raises:
        UsageError: the folder cannot be made.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        for path in _candidates(base, name):
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            if latest:
                point_latest(path)
            return path
    except OSError as error:
        raise UsageError(f"report.dir: no run folder could be made in {base}: {error.strerror or error}") from error
    raise AssertionError("the numbers never end")


def names_like(base: Path, name: str) -> list[str]:
    """What of ``name``, ``name-2`` ... is there already."""
    return sorted(path.name for path in base.glob(f"{glob.escape(name)}*") if _is_numbered(path.name, name))


def free_name(name: str, taken_names: Collection[str]) -> str:
    """``name``, or the first of ``name-2`` ... that is not among ``taken_names``."""
    return next(path.name for path in _candidates(Path(), name) if path.name not in taken_names)


def write_once(path: Path, text: str, *, writer: int) -> None:
    """Write a small file unless it holds that already: several hosts may do so at once in a folder that they share."""
    try:
        if path.read_text(encoding="utf-8") == text:
            return
    except (OSError, UnicodeDecodeError):
        pass
    temporary = path.with_name(f".{path.name}.{writer}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


@contextmanager
def taken(run: RunFolder, *, node: int = 0) -> Iterator[None]:
    """While inside, no other starter of host ``node`` runs a job in this folder; the lock ends with the process.

    Raises:
        UsageError: another one does.
    """
    with (run.path / f".lock-{node}").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UsageError(
                f"{run.path}: process {file.read().strip() or '?'} is running a job in this folder; end it first, or wait"
            ) from error
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield


def point_latest(path: Path) -> None:
    """Make ``latest`` beside ``path`` a link to it; where links are not possible, leave it."""
    link = path.parent / LATEST
    temporary = path.parent / f".{LATEST}.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(link)
    except OSError:
        temporary.unlink(missing_ok=True)


def _candidates(base: Path, name: str) -> Iterator[Path]:
    yield base / name
    for count in itertools.count(2):
        yield base / f"{name}-{count}"


# ------------------------------------------------------------------------------------------------------------- resuming
@dataclass(frozen=True, slots=True)
class Resume:
    """From where a job goes on."""

    run: Path
    """Its run folder: the one it was started in, where it goes on too."""
    checkpoint: Path


def find_resume(given: str | None, *, base: Path, name: str) -> Resume:
    """The run and the newest intact checkpoint that ``given`` stands for.

    Args:
        given: a checkpoint, a run folder, or None: the newest run of ``name`` in ``base`` that has an
            intact one.

    Raises:
        CheckpointError: there is no intact one; every place that was looked at is named.
    """
    from mtrain.core.checkpoint import store as checkpoint

    if given is not None:
        path = Path(given)
        if path.name.startswith(checkpoint.PREFIX):
            problems = checkpoint.verify(path)
            if problems:
                raise CheckpointError(
                    f"--resume {given}: {'; '.join(problems)}; give the run folder to use its newest intact one"
                )
            return Resume(path.parent.parent if path.parent.name == "checkpoints" else path.parent, path)
        runs = [path.parent if path.name == "checkpoints" else path]
    else:
        runs = _runs_of(base, name)
    for run in runs:
        found = checkpoint.newest(run / "checkpoints")
        if found is not None:
            return Resume(run, found)
    looked = ", ".join(str(run / "checkpoints") for run in runs) or f"{base / name} (no such run)"
    raise CheckpointError(
        f"--resume{f' {given}' if given else ''}: no intact checkpoint in {looked}; "
        "give the path of one, or leave --resume out"
    )


def _runs_of(base: Path, name: str) -> list[Path]:
    """Run folders ``name``, ``name-2`` ..., the one that was written to last first."""
    found = [path for path in base.glob(f"{name}*") if path.is_dir() and _is_numbered(path.name, name)]
    return sorted(found, key=_written, reverse=True)


def _is_numbered(folder: str, name: str) -> bool:
    return folder == name or (folder.startswith(f"{name}-") and folder.removeprefix(f"{name}-").isdigit())


def _written(run: Path) -> float:
    return max((p.stat().st_mtime for p in (run, run / METRICS, run / "checkpoints") if p.exists()), default=0.0)


# ------------------------------------------------------------------------------------------- what ranks leave behind
def write_failure(run: RunFolder, rank: int, error: BaseException, *, now: float | None = None) -> Path:
    """Called by a rank that fails: leave the error where the starter finds it."""
    run.failures.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = run.failures / f"rank-{rank}.json"
    content = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time() if now is None else now,
        "error": f"{type(error).__name__}: {error}",
        "message": str(error),
        "exit_code": error.exit_code if isinstance(error, MtrainError) else 1,
        "expected": isinstance(error, MtrainError),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(path, content)
    return path


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of ``folder`` by name: logs are appended to, and an attempt is judged by its own part of them."""
    return {path.name: path.stat().st_size for path in folder.glob("*.log")}


def set_aside_failures(run: RunFolder, *, ranks: range | None = None) -> None:
    """Rename what ``ranks`` (None: all) left in an earlier attempt, so that it is not taken for a new failure."""
    for path in _failure_files(run, ranks):
        path.rename(path.with_name(f"earlier-{int(path.stat().st_mtime)}-{path.name}"))


def read_failures(run: RunFolder, *, ranks: range | None = None) -> list[dict[str, Any]]:
    """What failed ranks among ``ranks`` (None: all) have left, the earliest first."""
    found = []
    for path in _failure_files(run, ranks):
        try:
            content = parse_json(read_bytes(path, limit=MAX_FAILURE_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return sorted(found, key=lambda failure: (failure.get("time", 0.0), failure.get("rank", 0)))


def _failure_files(run: RunFolder, ranks: range | None) -> list[Path]:
    if ranks is None:
        return list(run.failures.glob("rank-*.json"))
    return [path for path in (run.failures / f"rank-{rank}.json" for rank in ranks) if path.exists()]


def _packages() -> list[str]:
    """This distribution and what it requires, extras included."""
    try:
        required = metadata.requires("mtrain") or []
    except metadata.PackageNotFoundError:  # run from a clone that is not installed
        required = []
    names = (re.match(r"[\w.-]+", line) for line in ["mtrain", *required])
    return sorted({found.group() for found in names if found})


def describe_environment(environ: Mapping[str, str], *, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, machine, and ``environ`` and the command ``argv``, which the caller has redacted."""
    versions = {}
    for name in _packages():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "cores": os.cpu_count(),
        "argv": list(argv),
        "versions": versions,
        "environment": dict(environ),
    }


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What the run says of its result; empty when it wrote none."""
    try:
        summary = json.loads(RunFolder(run_dir).summary.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
