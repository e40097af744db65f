"""The folder of one run: its files, the name of a new one, and the lock of the job that runs in it.

::

    runs/<name>/  spec.json spec.yml plan.json plan.txt environment.json
                  chosen.json                                                the request (written by the starter)
                  spec.1.yml spec.2.yml ...                                  earlier specs, if resumed with changes
                  metrics.jsonl summary.json results.png val_batch.jpg tensorboard/   the results (written by rank 0)
                  checkpoints/  logs/rank-N.log logs/starter.log  failures/rank-N.json
    runs/latest   link to the newest run folder
"""

import fcntl
import glob
import itertools
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mtrain.core.record_files import METRICS, RESULTS, SUMMARY
from mtrain.errors import TrainingError, UsageError
from mtrain.spec import outputs
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes, read_text

LATEST = "latest"
CHOSEN = "chosen.json"
"""File with what somebody chose for the run, see ``cluster.chosen``."""
REQUEST_FILES = ("spec.json", "spec.yml", "plan.txt", "plan.json", "environment.json", CHOSEN)
"""Files of a run folder that record the request: the spec, the plan and the environment."""
JOB = "a job in this folder"
ROUNDS = "rounds.json"
"""File with the folders of the trainings that a job of `mtrain compare` does before its own, in one start."""


def keep_private() -> None:
    """Make every file that this process and its children create readable by its owner alone."""
    # Frameworks, launchers and libraries write files too, and only the process's mask applies to all of them.
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
        """Image of the curves of losses, learning rates and metrics."""
        return self.path / RESULTS

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def profiles(self) -> Path:
        """Folder of the profiles that ranks write where ``report.profile`` asks for them."""
        return self.path / "profile"

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
        """Create the folders, readable by their owner alone.

        Raises:
            UsageError: one cannot be made, or a link in the run folder leads out of it.
        """
        try:
            outputs.refuse_links_out(self.path)
            for folder in (self.path, self.checkpoints, self.failures, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error


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
            if path == run.spec_yml and path.exists() and read_bytes(path, limit=MAX_OWN_BYTES) != new.read_bytes():
                _keep_earlier(path)
            new.replace(path)
    except OSError as error:
        raise TrainingError(f"{run.path}: the new spec cannot be put there: {error.strerror or error}") from error


def _keep_earlier(spec: Path) -> None:
    """Copy ``spec`` to the next free numbered name. The file itself stays until the new one replaces it."""
    numbered = (spec.with_name(f"{spec.stem}.{count}{spec.suffix}") for count in itertools.count(1))
    free = next(path for path in numbered if not path.exists())
    outputs.write_bytes(free, spec.read_bytes())


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


def follow_latest(path: Path) -> Path:
    """Return ``path`` with the run folder itself where it goes through the link ``latest``.

    The link is pointed to a run that starts or goes on. A job that had this name for its folder would point it to itself.
    """
    followed = Path()
    for part in path.parts:
        followed /= part
        if part == LATEST and followed.is_symlink():
            followed = followed.parent / followed.readlink()
    return followed


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
    return sorted(path.name for path in base.glob(f"{glob.escape(name)}*") if is_numbered(path.name, name))


def is_numbered(folder: str, name: str) -> bool:
    """Return whether ``folder`` is the name ``name`` or a numbered one of it, such as ``name-2``."""
    return folder == name or (folder.startswith(f"{name}-") and folder.removeprefix(f"{name}-").isdigit())


def free_name(name: str, taken_names: Collection[str]) -> str:
    """Return ``name``, or the first of ``name-2`` ... that is not among ``taken_names``."""
    return next(path.name for path in _candidates(Path(), name) if path.name not in taken_names)


def write_once(path: Path, text: str) -> None:
    """Write a small text file, unless it holds ``text`` already.

    Several hosts may call this at once for the same file in a shared folder.
    """
    try:
        if read_text(path, limit=MAX_OWN_BYTES) == text:
            return
    except (OSError, ValueError):
        pass
    outputs.write_text(path, text)


def take_folder(run: RunFolder, *, node: int = 0) -> AbstractContextManager[None]:
    """Lock this folder, so that no other process runs a job in it as host ``node``, see ``hold``."""
    return hold(run.path, f".lock-{node}", doing=JOB)


@contextmanager
def hold(folder: Path, name: str, *, doing: str) -> Iterator[None]:
    """Lock a folder by a file of this name, so that no other process does the same there. The lock ends with the process.

    Raises:
        UsageError: another process holds the lock, the folder cannot be written to, or a link in it leads out of it.
    """
    with _opened_lock(folder, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _is_held(folder, file, doing) from error
        except OSError:  # The file system has no locks: run unprotected instead of refusing every job.
            pass
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield


def refuse_running(run: Path) -> None:
    """Refuse a run folder in which a job runs, as whichever host.

    Raises:
        UsageError: a process holds a lock of the folder.
    """
    # Otherwise a second start would choose a checkpoint that the first one deletes meanwhile, and speak of that.
    for path in run.glob(".lock-*"):
        try:  # Somebody else's folder may have a pipe or a link of that name.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        with os.fdopen(descriptor) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _is_held(run, file, JOB) from error
            except OSError:  # The file system has no locks.
                return


def _is_held(folder: Path, lock: IO[str], doing: str) -> UsageError:
    lock.seek(0)
    number = lock.read(20).strip() or "?"
    return UsageError(f"{folder}: process {number} is running {doing}; end it first, or wait")


def _opened_lock(folder: Path, name: str) -> IO[str]:
    try:
        outputs.refuse_links_out(folder)
        return outputs.open_to_write(folder / name, "a+")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(run: Path, error: OSError) -> UsageError:
    return UsageError(f"{run}: cannot be written to: {error.strerror or error}")


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


def sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each log file in ``folder``, by file name.

    Logs are appended to by each attempt of a job. The sizes at its start tell which part of a log belongs to an
    attempt.
    """
    return {path.name: path.stat().st_size for path in folder.glob("*.log")}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the result that the run wrote (``summary.json``); empty if there is none."""
    try:
        summary = parse_json(read_bytes(RunFolder(run_dir).summary, limit=MAX_OWN_BYTES))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
