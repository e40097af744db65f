"""The checkpoints of one run: write them while training goes on, delete those that are not needed, find intact ones.

Rank 0 uses ``Checkpoints``, the other ranks ``NoCheckpoints``, so that callers need not distinguish ranks.
"""

import fcntl
import logging
import math
import os
import re
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mtrain.core.checkpoint import format as files
from mtrain.core.checkpoint import together
from mtrain.core.checkpoint.background import Background
from mtrain.core.checkpoint.format import Content, Saved, load, progress_of, verify
from mtrain.core.interfaces import Progress, SplitStream, State, StateStream
from mtrain.core.overriding import override
from mtrain.core.state.streams import WholeStream
from mtrain.errors import TrainingError
from mtrain.spec import outputs
from mtrain.spec.files import open_file

__all__ = [
    "CheckpointStore",
    "Checkpoints",
    "NoCheckpoints",
    "Saved",
    "best",
    "folder_of",
    "list_all",
    "load",
    "newest",
    "progress_of",
    "verify",
]

PREFIX = "step-"
TEMPORARY = ".tmp-"
log = logging.getLogger(__name__)


def folder_of(folder: Path, update: int) -> Path:
    """Return where in ``folder`` the checkpoint after ``update`` updates is, or will be once it is complete."""
    return folder / f"{PREFIX}{update:08d}"


def update_named(path: Path) -> int:
    """Return the update that the name of a checkpoint's folder tells, which may be on another host; -1: it tells none."""
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if path.name.startswith(PREFIX) and digits.isdecimal() else -1


class CheckpointStore(ABC):
    """The interface through which the training loop saves and finds checkpoints, on every rank."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._background = Background(asynchronous=asynchronous)

    @property
    def waited_s(self) -> float:
        """Total time in seconds that the loop has waited for earlier saves to end."""
        return self._background.waited_s

    @abstractmethod
    def save(
        self,
        state: State | StateStream,
        progress: Progress,
        *,
        score: float | None,
        spec: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        """Write one checkpoint; every rank must call with its stream. Another thread may read ``state``, which must hold copies.

        Raises:
            TrainingError: this or an earlier save failed (disk full); earlier checkpoints are intact.
        """

    def keep_next(self, names: Sequence[str]) -> None:
        """Keep the checkpoint that is saved next under these names, too. They are not deleted, and replace former ones."""
        return

    def check(self) -> None:
        """Raise the error of a save that has failed in the meantime. It returns immediately and waits for nothing."""
        self._background.check()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of a save that has failed."""
        self._background.wait()

    def newest(self) -> Path | None:
        """Return the most recently written checkpoint that is intact. Damaged ones are skipped with a warning."""
        return None

    def best(self) -> Path | None:
        """Return the intact checkpoint with the highest score; of equal scores, the one with the earliest update."""
        return None


class NoCheckpoints(CheckpointStore):
    """The store of the other ranks: they write their parts of the arrays or send them to rank 0, and find nothing."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        super().__init__(asynchronous=asynchronous)

    @override
    def save(self, state: State | StateStream, progress: Progress, **_: Any) -> None:
        if not isinstance(state, State):
            self._background.start(lambda: _send(state), name="checkpoint-sender")


class Checkpoints(CheckpointStore):
    """A folder of checkpoints with one writer.

    The ``keep_last`` newest and the ``keep_best`` best checkpoints are kept. At most one save runs at a time; another
    one waits for it. ``on_written`` learns of each checkpoint once it is complete, in the thread that wrote it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_best: int,
        asynchronous: bool,
        on_written: Callable[[Path], None] = lambda checkpoint: None,
    ) -> None:
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        super().__init__(asynchronous=asynchronous)
        self._on_written = on_written
        self._made_room = False
        self._names: Sequence[str] = ()
        outputs.make_folder(self.folder)
        _clean(self.folder)
        self._serial = max((_serial(path) for path in list_all(self.folder)), default=0)

    @override
    def save(
        self,
        state: State | StateStream,
        progress: Progress,
        *,
        score: float | None,
        spec: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        self.wait()
        self._serial += 1
        # Ordered by numbers and not by clocks: times of hosts that wrote parts of one run may disagree.
        meta = {"score": score, "serial": self._serial, "extra": dict(extra)}
        copied = replace(progress)  # the loop goes on while another thread writes
        stream = WholeStream(state) if isinstance(state, State) else state
        content = Content(stream, copied, spec=dict(spec), meta=meta)
        names, self._names = self._names, ()
        self._background.start(lambda: self._write(content, names), name="checkpoint-writer")

    @override
    def keep_next(self, names: Sequence[str]) -> None:
        self._names = names

    @override
    def newest(self) -> Path | None:
        return newest(self.folder)

    @override
    def best(self) -> Path | None:
        return best(self.folder)

    def _write(self, content: Content, names: Sequence[str]) -> None:
        name = folder_of(self.folder, content.progress.update).name
        temporary = self.folder / f"{TEMPORARY}{name}@{socket.gethostname()}@{os.getpid()}"
        try:
            content.share(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            self._make_room()
            files.write(temporary, content)
            files.publish(temporary, self.folder / name)
            for kept in names:
                _link(self.folder / name, self.folder / kept)
            self._retain(self.folder / name)
            self._on_written(self.folder / name)
        except Exception as error:
            # Other ranks send their parts of the arrays, and would wait for ever for somebody who takes them.
            content.read_to_its_end()
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise self._explain(error, name) from error

    def _explain(self, error: OSError, name: str) -> TrainingError:
        last_good = newest(self.folder)
        earlier = f"the last good one is {last_good}" if last_good else "there is no earlier one"
        return TrainingError(
            f"checkpoint {name} could not be written to {self.folder}: {error.strerror or error}; {earlier}. "
            "Make room (or set checkpoint.keep_last lower), then go on with --resume"
        )

    def _make_room(self) -> None:
        """Delete, before the first checkpoint of this job is written, those that its rule does not keep.

        A job that goes on after its disk was full may keep fewer than before.
        """
        if self._made_room:
            return
        self._made_room = True
        complete = [path for path in list_all(self.folder) if looks_whole(path)]
        intact = newest(self.folder) if len(complete) > self._keep_last + self._keep_best else None
        if intact is not None:
            self._retain(intact)

    def _retain(self, new: Path) -> None:
        """Delete the checkpoints that no rule keeps.

        ``new`` has just been written and flushed and is always kept, so one intact checkpoint remains in any case.
        """
        complete = [path for path in list_all(self.folder) if looks_whole(path)]
        keep = {new, *complete[-self._keep_last :]}
        keep.update(_by_score(complete)[: self._keep_best])
        for path in complete:
            if path not in keep and not _is_held(path):
                # Renamed first, so that a checkpoint whose deletion is interrupted does not look like a damaged one.
                doomed = path.with_name(f"{TEMPORARY}{path.name}@{socket.gethostname()}@{os.getpid()}.old")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _send(stream: StateStream) -> None:
    """Write this rank's parts of all arrays, or send them to rank 0, which tells what has failed."""
    folder = together.agree(stream, None) if isinstance(stream, SplitStream) else None
    if folder is not None:
        with suppress(OSError):
            together.write(cast("SplitStream", stream), files.files_in(folder), creates=False)
        return
    for _ in files.in_file_order(stream):
        pass


def _link(checkpoint: Path, final: Path) -> None:
    """Make ``final`` a checkpoint of the same files, which take no further space where the disk knows hard links."""
    temporary = final.with_name(f"{TEMPORARY}{final.name}@{socket.gethostname()}@{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, temporary, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(temporary, ignore_errors=True)
        # The disk knows no hard links.
        shutil.copytree(checkpoint, temporary)
    files.publish(temporary, final)


def is_kept_name(name: str) -> bool:
    """Return whether a checkpoint can be kept under this name, which is that of a folder and none of mtrain's own."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)) and not name.startswith(PREFIX)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path names a checkpoint and no run: by its name, or as one that was kept under another."""
    return path.name.startswith(PREFIX) or (path.parent.name == "checkpoints" and (path / files.MANIFEST).is_file())


def list_all(folder: Path) -> list[Path]:
    """Return all checkpoints in ``folder``, including damaged ones, in the order in which they were written.

    Raises:
        PermissionError: the folder may not be read.
    """
    try:
        names = os.listdir(folder)
    except PermissionError:  # Its checkpoints are not known, which is not the same as that it has none.
        raise
    except OSError:
        return []
    paths = (Path(folder) / name for name in names if name.startswith(PREFIX))
    return sorted((path for path in paths if path.is_dir()), key=lambda p: (_serial(p), p.name))


def list_named(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder`` that were kept under a name, by name."""
    return sorted(path for path in Path(folder).iterdir() if is_kept_name(path.name) and is_checkpoint(path))


def newest(folder: Path) -> Path | None:
    """Return the most recently written intact checkpoint in ``folder``. Damaged ones are named in a warning."""
    return _first_intact(folder, lambda paths: sorted(paths, key=_order, reverse=True), tell=log.warning)


def best(folder: Path) -> Path | None:
    """Return the intact checkpoint in ``folder`` with the highest score, of equal ones the first; None without any."""
    return _first_intact(folder, _by_score)


def _first_intact(
    folder: Path, ordered: Callable[[list[Path]], list[Path]], *, tell: Callable[..., None] = lambda *words: None
) -> Path | None:
    """Return the first intact checkpoint in an order. Where a job deletes one at this moment, it has written a newer one."""
    paths = list_all(folder) or list_all(folder)  # the second look finds the one that took the place of the last one
    for path in ordered(paths):
        problems = verify(path)
        if not problems and _hold(path):
            return path
        if not path.exists():
            return _first_intact(folder, ordered, tell=tell)
        if problems:
            tell("checkpoint %s is damaged and passed over: %s", path, "; ".join(problems))
    return None


_holds: ContextVar[ExitStack | None] = ContextVar("holds", default=None)
"""What keeps the checkpoints that were chosen; None: nobody has asked for it."""


@contextmanager
def holding() -> Iterator[None]:
    """Keep the checkpoints that ``newest`` and ``best`` return while the context lasts, also in the folder of a job that runs."""
    with ExitStack() as stack:
        former = _holds.set(stack)
        try:
            yield
        finally:
            _holds.reset(former)


def _hold(path: Path) -> bool:
    """Hold a checkpoint if that was asked for; return whether it is still there."""
    stack = _holds.get()
    if stack is not None:
        try:
            file = stack.enter_context(open_file(path / files.MANIFEST))
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            return False
    return path.exists()


def _is_held(path: Path) -> bool:
    """Return whether another process reads a checkpoint now; what begins to read it afterwards finds it gone."""
    try:
        with open_file(path / files.MANIFEST) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _by_score(paths: Iterable[Path]) -> list[Path]:
    """Return the checkpoints that have a score, the highest score first.

    Of equal scores the earlier update counts as better, as in ``cadence.count_score``, so that the summary and the best
    checkpoint refer to the same update.
    """
    scored = [path for path in paths if score_of(path) > -math.inf]
    return sorted(scored, key=lambda path: (-score_of(path), _update(path)))


def _order(path: Path) -> tuple[int, int]:
    """Return a sort key: by serial number, and checkpoints without a manifest last.

    ``newest`` goes through them in reverse, so it meets those without a manifest first and always names them in a
    warning.
    """
    manifest = files.manifest_of(path)
    return (1, _serial(path)) if not manifest else (0, _serial(path))


def looks_whole(path: Path) -> bool:
    """Return whether every file exists in its full size: a fast check that does not read the files."""
    manifest = files.manifest_of(path)
    try:
        return bool(manifest) and all(
            (path / name).stat().st_size == entry["size_bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, KeyError, TypeError, ValueError):
        return False


def score_of(path: Path) -> float:
    """Return the score with which the checkpoint was saved; -inf if it has none."""
    return files.score_in(files.manifest_of(path))


def order_of(path: Path) -> tuple[int, int]:
    """Return a sort key of a checkpoint among those of its run, also on other hosts: the newest one has the largest."""
    return _serial(path), _update(path)


def _serial(path: Path) -> int:
    serial = files.manifest_of(path).get("serial", 0)
    return serial if isinstance(serial, int) else 0


def _update(path: Path) -> int:
    update = files.manifest_of(path).get("update", 0)
    return update if isinstance(update, int) else 0


def _clean(folder: Path) -> None:
    """Remove temporary folders of writers that have died.

    The names contain the host and the process. Folders of other hosts are not touched, as their writers may be alive.
    """
    for path in folder.glob(f"{TEMPORARY}*.former"):  # killed between the two renames of ``publish``
        final = folder / path.name.removeprefix(TEMPORARY).partition("@")[0]
        if not final.exists():
            path.rename(final)
    for path in _find_abandoned(folder):
        shutil.rmtree(path, ignore_errors=True)


def _find_abandoned(folder: Path) -> Iterator[Path]:
    """Yield the temporary folders of this host's writers that have died."""
    for path in folder.glob(f"{TEMPORARY}*"):
        _, _, rest = path.name.partition("@")
        host, _, process = rest.partition("@")
        # A folder with the number of this process was left by an earlier one: numbers come again.
        number = process.split(".")[0]
        if host == socket.gethostname() and (
            not number.isdigit() or int(number) == os.getpid() or not _alive(int(number))
        ):
            yield path


def reusable_bytes(folder: Path) -> int:
    """Return the bytes in ``folder`` that the checkpoints of a job that goes on will take the place of.

    These are whole checkpoints, which rotate, and what writers that have died have left, which is deleted at the start.
    Damaged checkpoints stay.
    """
    left = (file.stat() for path in _find_abandoned(folder) for file in path.rglob("*") if file.is_file())
    whole = (path for path in list_all(folder) if looks_whole(path))
    # A file with several links is one of a checkpoint that was being copied, which has been counted.
    return sum(map(files.size_of, whole)) + sum(status.st_size for status in left if status.st_nlink == 1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
