"""The folder of one run: its files, the name of a new one, and finding the checkpoint from which to resume.

::

    runs/<name>/  spec.json spec.yml plan.json plan.txt environment.json     the request (written by the starter)
                  spec.1.yml spec.2.yml ...                                  earlier specs, if resumed with changes
                  metrics.jsonl summary.json results.png val_batch.jpg tensorboard/   the results (written by rank 0)
                  checkpoints/  logs/rank-N.log logs/starter.log  failures/rank-N.json
    runs/latest   link to the newest run folder
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
"""Largest failure file (``failures/rank-N.json``) that is read, in bytes."""

LATEST = "latest"
REQUEST_FILES = ("spec.json", "spec.yml", "plan.txt", "plan.json", "environment.json")
"""Files of a run folder that record the request: the spec, the plan and the environment."""
ROUNDS = "rounds.json"
"""File with the folders of the trainings that a job of `mtrain compare` does before its own, in one start."""


def keep_private() -> None:
    """Make every file that this process and its children create readable by its owner alone.

    The process's mask (umask) is set because frameworks, launchers and libraries write files too, and only the mask
    applies to all of them.
    """
    os.umask(0o077)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Constructing the object does not touch the disk."""

    path: Path
    log_dir: Path | None = None
    """Folder of the logs, from ``cluster.log_dir``; None: ``logs`` in the run folder."""
    node: int | None = None
    """Number of this host, for files of which every host writes its own; None: the job has only one host."""

    @property
    def spec_json(self) -> Path:
        """File of the resolved spec that the ranks read."""
        return self.path / "spec.json"

    @property
    def spec_yml(self) -> Path:
        """File of the resolved spec for people."""
        return self.path / "spec.yml"

    @property
    def spec_to_read(self) -> Path:
        """File of the resolved spec of the job that is starting.

        While a job resumes, its spec lies beside that of the run (see ``pending``).
        """
        pending_spec = pending(self.spec_json)
        return pending_spec if pending_spec.exists() else self.spec_json

    @property
    def metrics(self) -> Path:
        """File of the run's records, one JSON object per line."""
        return self.path / METRICS

    @property
    def summary(self) -> Path:
        """File of the run's result."""
        return self.path / SUMMARY

    @property
    def results(self) -> Path:
        """Picture of the curves of losses, rates and figures."""
        return self.path / RESULTS

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        """Folder of the files that failed ranks write."""
        return self.path / "failures"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.log_dir or self.path / "logs"

    @property
    def starter_log(self) -> Path:
        """File with the output of the launcher's command, which starts the ranks."""
        return self.logs / ("starter.log" if self.node is None else f"host-{self.node}.log")

    def rank_log(self, rank: int) -> Path:
        """Return the file with the output of one rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_logs(self, ranks: range | None = None) -> dict[int, Path]:
        """Return the log files of ``ranks`` (None: of all ranks) that exist."""
        numbers = (path.stem.removeprefix("rank-") for path in self.logs.glob("rank-*.log"))
        logged_ranks = sorted(int(number) for number in numbers if number.isdigit())
        return {rank: self.rank_log(rank) for rank in logged_ranks if ranks is None or rank in ranks}

    def make(self) -> None:
        """Create the folders, readable by their owner alone."""
        for folder in (self.path, self.checkpoints, self.failures, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


# -------------------------------------------------------------------------------------------------------- the request
def pending(path: Path) -> Path:
    """Return the path of a resumed job's own version of ``path``, for example ``spec.next.yml``.

    It replaces ``path`` once the ranks have restored the checkpoint (see ``adopt``). A job that fails before leaves the
    run's files as they were.
    """
    return path.with_name(f"{path.stem}.next{path.suffix}")


def adopt(run: RunFolder) -> None:
    """Replace the run's request files by those of the resumed job. Rank 0 calls it once the checkpoint is restored.

    If the spec has changed, the earlier one is kept beside it as ``spec.1.yml``, ``spec.2.yml`` ...

    Raises:
        TrainingError: the folder cannot be written to.
    """
    try:
        for name in REQUEST_FILES:
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
    """Copy ``spec`` to the next free numbered name. The file itself stays until the new one replaces it."""
    numbered = (spec.with_name(f"{spec.stem}.{count}{spec.suffix}") for count in itertools.count(1))
    free = next(path for path in numbered if not path.exists())
    temporary = free.with_name(f".{free.name}.{os.getpid()}")
    shutil.copy2(spec, temporary)
    temporary.replace(free)


# -------------------------------------------------------------------------------------------------------------- names
def next_name(base: Path, name: str) -> Path:
    """Return the folder that ``create`` would make now: ``name``, or ``name-2`` ... if that exists. Creates nothing."""
    return next(path for path in _candidates(base, name) if not path.exists())


def create(base: Path, name: str, *, latest: bool = True) -> Path:
    """Make a new run folder and, with ``latest``, point the link ``latest`` to it. Safe if two jobs start at once.

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


def make(run: Path) -> None:
    """Make the run folder ``run`` if it does not exist, and point the link ``latest`` to it.

    Raises:
        UsageError: the folder cannot be made.
    """
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir(mode=0o700, exist_ok=True)
        point_latest(run)
    except OSError as error:
        raise UsageError(f"{run}: the run folder could not be made: {error.strerror or error}") from error


def names_like(base: Path, name: str) -> list[str]:
    """Return which of the names ``name``, ``name-2`` ... exist in ``base``."""
    return sorted(path.name for path in base.glob(f"{glob.escape(name)}*") if _is_numbered(path.name, name))


def free_name(name: str, taken_names: Collection[str]) -> str:
    """Return ``name``, or the first of ``name-2`` ... that is not among ``taken_names``."""
    return next(path.name for path in _candidates(Path(), name) if path.name not in taken_names)


def write_once(path: Path, text: str, *, writer: int) -> None:
    """Write a small text file, unless it holds ``text`` already.

    Several hosts may call this at once for the same file in a shared folder; ``writer``, the number of the host, keeps
    their temporary files apart.
    """
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
    """Lock this folder, so that no other process runs a job in it as host ``node``. The lock ends with the process.

    Raises:
        UsageError: another process holds the lock.
    """
    with (run.path / f".lock-{node}").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UsageError(
                f"{run.path}: process {file.read().strip() or '?'} is running a job in this folder; "
                "end it first, or wait"
            ) from error
        except OSError:  # The file system has no locks: run unprotected instead of refusing every job.
            pass
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield


def point_latest(path: Path) -> None:
    """Make ``latest`` in the folder of ``path`` a link to it. Where the file system has no links, do nothing."""
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
IF_ANY = "if-any"
"""The value of ``--resume`` for one command that starts a job the first time and continues it each further time."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The run that a job continues, and the checkpoint that it starts from."""

    run: Path
    """Run folder in which the job was started and goes on."""
    checkpoint: Path | None
    """None with ``IF_ANY``: there is no intact one, so the job begins."""


def find_resume(requested: str | None, *, base: Path, name: str) -> Resume:
    """Find the run to resume and its newest intact checkpoint.

    Args:
        requested: a checkpoint or a run folder; None: the newest run of ``name`` in ``base`` that has an intact
            checkpoint; ``IF_ANY``: the run folder ``name`` itself, with or without a checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint; every folder that was searched is named.
    """
    from mtrain.core.checkpoint import store as checkpoint

    if requested == IF_ANY:
        return Resume(base / name, checkpoint.newest(base / name / "checkpoints"))
    if requested is not None:
        path = Path(requested)
        if path.name.startswith(checkpoint.PREFIX):
            problems = checkpoint.verify(path)
            if problems:
                raise CheckpointError(
                    f"--resume {requested}: {'; '.join(problems)}; give the run folder to use its newest intact one"
                )
            return Resume(path.parent.parent if path.parent.name == "checkpoints" else path.parent, path)
        runs = [path.parent if path.name == "checkpoints" else path]
    else:
        runs = _runs_of(base, name)
    for run in runs:
        newest = checkpoint.newest(run / "checkpoints")
        if newest is not None:
            return Resume(run, newest)
    searched_folders = ", ".join(str(run / "checkpoints") for run in runs) or f"{base / name} (no such run)"
    raise CheckpointError(
        f"--resume{f' {requested}' if requested else ''}: no intact checkpoint in {searched_folders}; "
        "give the path of one, or leave --resume out"
    )


def _runs_of(base: Path, name: str) -> list[Path]:
    """Return the run folders ``name``, ``name-2`` ..., the most recently written one first."""
    runs = [path for path in base.glob(f"{name}*") if path.is_dir() and _is_numbered(path.name, name)]
    return sorted(runs, key=_last_written, reverse=True)


def _is_numbered(folder: str, name: str) -> bool:
    return folder == name or (folder.startswith(f"{name}-") and folder.removeprefix(f"{name}-").isdigit())


def _last_written(run: Path) -> float:
    return max((p.stat().st_mtime for p in (run, run / METRICS, run / "checkpoints") if p.exists()), default=0.0)


# ---------------------------------------------------------------------------------------------------- failures of ranks
def write_failure(run: RunFolder, rank: int, error: BaseException, *, now: float | None = None) -> Path:
    """Write the error of a failing rank into the run folder, where the process that started it looks for it."""
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
    """Return the size in bytes of each log file in ``folder``, by file name.

    Logs are appended to by each attempt of a job. The sizes at its start tell which part of a log belongs to an
    attempt.
    """
    return {path.name: path.stat().st_size for path in folder.glob("*.log")}


def set_aside_failures(run: RunFolder, *, ranks: range | None = None) -> None:
    """Rename earlier failure files of ``ranks`` (None: all), so that they do not count as failures of a new attempt."""
    for path in _failure_files(run, ranks):
        path.rename(path.with_name(f"earlier-{int(path.stat().st_mtime)}-{path.name}"))


def read_failures(run: RunFolder, *, ranks: range | None = None) -> list[dict[str, Any]]:
    """Return the failures that ``ranks`` (None: all) have written, the earliest first, without unreadable files."""
    failures = []
    for path in _failure_files(run, ranks):
        try:
            content = parse_json(read_bytes(path, limit=MAX_FAILURE_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            failures.append(content)
    return sorted(failures, key=lambda failure: (failure.get("time", 0.0), failure.get("rank", 0)))


def _failure_files(run: RunFolder, ranks: range | None) -> list[Path]:
    if ranks is None:
        return list(run.failures.glob("rank-*.json"))
    return [path for path in (run.failures / f"rank-{rank}.json" for rank in ranks) if path.exists()]


def _packages() -> list[str]:
    """Return the names of this distribution and of its requirements, those of extras included."""
    try:
        requirements = metadata.requires("mtrain") or []
    except metadata.PackageNotFoundError:  # mtrain runs from a clone that is not installed.
        requirements = []
    matches = (re.match(r"[\w.-]+", line) for line in ["mtrain", *requirements])
    return sorted({match.group() for match in matches if match})


def describe_environment(environ: Mapping[str, str], *, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions of packages, facts about the machine, and ``environ`` and ``argv``.

    The caller must have removed secrets from ``environ`` and from the command ``argv``.
    """
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
    """Return the result that the run wrote (``summary.json``); empty if there is none."""
    try:
        summary = json.loads(RunFolder(run_dir).summary.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
