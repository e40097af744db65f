"""Restore a run from its copies: ``--resume s3://bucket/prefix/run`` on a host that has nothing of it."""

import atexit
import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain.core.checkpoint import format as files
from mtrain.core.checkpoint import store
from mtrain.errors import CheckpointError
from mtrain.jobs.resume.find import IF_ANY, Where, find_resume
from mtrain.spec import outputs
from mtrain.spec.addresses import is_address
from mtrain.spec.files import MAX_OWN_BYTES, read_bytes
from mtrain.system import disk, runfolder
from mtrain.system.runfolder import RunFolder
from mtrain.weights.backup import form
from mtrain.weights.backup.form import BadCopy, FileDigest
from mtrain.weights.backup.place import PlaceError, StorageFolder
from mtrain.weights.backup.run_copies import Copy, RunCopies, newest_first

SPARE_BYTES = 16 << 20
"""Space that must be left on the disk after a copy is restored."""
SPEC_FILES = ("spec.yml", "spec.json", runfolder.CHOSEN)
"""Files of a run folder that tell the spec of a job which goes on."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The copies that an address names."""

    copies: RunCopies
    step: str | None
    """The one copy that it names; None: all of the run."""

    @property
    def label(self) -> str:
        """Return the address for messages."""
        return self.copies.place.in_words + (f"/{self.step}" if self.step else "")

    @classmethod
    def of(cls, address: str) -> "Source":
        """Read an address: that of a run, or of one of its copies.

        Raises:
            UsageError: it is no address, or a package is missing for it.
        """
        place = StorageFolder(address)
        step = place.name if form.STEP.fullmatch(place.name) else None
        return cls(copies=RunCopies(place if step is None else place.parent), step=step)

    def find_run(self) -> str | None:
        """Return the id of the run; None: there are no copies of one.

        Raises:
            CheckpointError: they cannot be reached.
        """
        try:
            return self.copies.run()
        except (PlaceError, BadCopy) as error:
            raise self.unreadable(error) from error

    def run(self) -> str:
        """Return the id of the run.

        Raises:
            CheckpointError: there are no copies, or they cannot be reached.
        """
        if (run := self.find_run()) is not None:
            return run
        try:
            runs = [name for name in self.copies.place.folders() if name != "checkpoints"]
        except PlaceError as error:
            raise self.unreadable(error) from error
        hint = f"; it holds {', '.join(runs[:8])}: add one of these names" if runs else ""
        raise CheckpointError(f"{self.label}: no copies of a run are there{hint}")

    def list_copies(self) -> tuple[list[Copy], dict[str, str]]:
        """Return the copies that the address names, the newest first, and for each other folder why it is none.

        Raises:
            CheckpointError: they cannot be reached.
        """
        try:
            copies, bad = self.copies.list_copies()
        except PlaceError as error:
            raise self.unreadable(error) from error
        chosen = [copy for copy in copies if self.step in (None, copy.name)]
        return chosen, {name: why for name, why in bad.items() if self.step in (None, name)}

    def candidates(self, *, best: bool = False) -> list[Copy]:
        """Return the copies to try, in this order. Others are named in a warning.

        Raises:
            CheckpointError: there is none, or they cannot be reached.
        """
        copies, bad = self.list_copies()
        for name, why in bad.items():
            self.pass_over(name, why)
        if not copies:
            raise CheckpointError(f"{self.label}: no intact copy of a checkpoint is there")
        return newest_first(copies, best=best)

    def pass_over(self, name: str, why: object) -> None:
        """Warn of a copy that is not used."""
        log.warning("copy %s/%s is passed over: %s", self.copies.place.in_words, name, why)

    def unreadable(self, error: Exception) -> CheckpointError:
        """Return the error of an address that cannot be reached."""
        return CheckpointError(f"{self.label}: cannot be read: {error}")


def restore_run(address: str, base: Path, *, best: bool = False) -> Where:
    """Restore a run from an address into ``base``: its newest intact copy, or with ``best`` that of the best score.

    A checkpoint that is in the run folder already is not fetched again. What is fetched is compared with its digests
    before it appears under its name.

    Raises:
        CheckpointError: there is no intact copy, it cannot be reached, the run folder is that of another run, or the disk
            has too little room.
    """
    source = Source.of(address)
    run = source.run()
    folder = RunFolder(base / source.copies.place.name)
    own = form.own_id(folder.path)
    if own != run and folder.path.exists() and any(folder.path.iterdir()):
        raise CheckpointError(
            f"{folder.path} is another run than {source.label}; move it away, or restore elsewhere with -o report.dir=FOLDER"
        )
    for copy in source.candidates(best=best):
        try:
            checkpoint = _fetch(source.copies, copy, folder, run)
        except BadCopy as error:
            source.pass_over(copy.name, error)
            continue
        except PlaceError as error:
            raise CheckpointError(f"{source.copies.place.in_words}/{copy.name}: cannot be read: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{folder.path}: cannot be written to: {error.strerror or error}") from error
        return Where(folder.path, checkpoint)
    raise CheckpointError(f"{source.label}: no intact copy of a checkpoint is there; see the warnings above")


def _fetch(copies: RunCopies, copy: Copy, folder: RunFolder, run: str) -> Path:
    """Return the checkpoint of a copy in the run folder, which is made, as complete as a run on this host has left it.

    Raises:
        BadCopy: the copy is damaged.
        PlaceError: it cannot be reached.
        OSError: this disk is full or gone.
    """
    companions = copies.companions(copy)
    if companions.run != run:
        raise BadCopy("it belongs to another run")
    final = folder.checkpoints / copy.name
    if _same(final, copy):
        return final
    sizes = (copy.manifest.size, SPARE_BYTES, *(entry.size for entry in companions.entries.values()))
    needed, free = sum(sizes), disk.free_bytes(folder.path)
    if needed > free:
        raise CheckpointError(
            f"{copies.place.in_words}/{copy.name}: needs {disk.in_words(needed)}, and {disk.in_words(free)} are free on the disk of "
            f"{folder.path}; make room, or restore elsewhere with -o report.dir=FOLDER"
        )
    runfolder.keep_private()
    folder.make()
    temporary = folder.checkpoints / f"{store.TEMPORARY}{copy.name}@{socket.gethostname()}@{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        for name, entry in copy.manifest.entries.items():
            _download(copies.place, f"{copy.name}/{name}", entry, temporary / name)
        for name, entry in companions.entries.items():
            _download(copies.place, f"{copy.name}/run/{name}", entry, temporary / f".{name}")
        outputs.write_bytes(temporary / files.MANIFEST, copy.manifest.content)
        for name in companions.entries:  # What the run folder has is newer, or the person's own.
            fetched = temporary / f".{name}"
            fetched.unlink() if (folder.path / name).exists() else fetched.replace(folder.path / name)
        files.flush_folder(temporary)
        files.publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    form.write_id(folder.path, run)
    return final


def _same(checkpoint: Path, copy: Copy) -> bool:
    """Return whether the checkpoint on this host is the copied one, and intact."""
    try:
        there = read_bytes(checkpoint / files.MANIFEST, limit=MAX_OWN_BYTES)
    except OSError:
        return False
    return there == copy.manifest.content and not store.verify(checkpoint)


def _download(place: StorageFolder, name: str, entry: FileDigest, path: Path) -> None:
    """Fetch one object into a new file.

    Raises:
        BadCopy: it is missing, or not what the copy's manifest says; at most one part too much is written.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with outputs.open_to_write(path, "xb") as file:
            for part in place.chunks(name, limit=entry.size):
                digest.update(part)
                size += len(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except PlaceError as error:
        if error.missing:
            raise BadCopy(f"{name.partition('/')[2]} is missing") from None
        raise
    if size != entry.size:
        raise BadCopy(f"{name.partition('/')[2]}: {size} bytes or more, expected {entry.size}")
    if digest.hexdigest() != entry.sha256:
        raise BadCopy(f"{name.partition('/')[2]}: its SHA-256 is not the one written (bits changed)")


# ------------------------------------------------------------------------------------------------------------- resuming
def fetch_resume(requested: str | None, *, base: Path, name: str, copy_to: str | None) -> Where:
    """Find the run to resume and its newest intact checkpoint, on this host or at an address; see ``find_resume``.

    ``requested``: also an address. None and ``IF_ANY``: where ``copy_to`` has newer copies of the run than this host, or this
    host has none, the run is restored from there.

    Raises:
        CheckpointError: there is no intact checkpoint, or it cannot be found out whether there are copies.
    """
    if requested is not None and is_address(requested):
        return restore_run(requested, base)
    if copy_to is None or requested not in (None, IF_ANY):
        return find_resume(requested, base=base, name=name)
    missing = None
    try:
        here = find_resume(requested, base=base, name=name)
    except CheckpointError as error:
        here, missing = Where(base / name, None), error
    try:
        source = Source.of(f"{copy_to}/{here.run.name}")
        run = source.find_run()
        if run is None and missing is not None:
            raise missing
        return (
            here if run is None or not _is_newer(source, run, here) else restore_run(source.copies.place.address, base)
        )
    except CheckpointError as error:
        # An address that is out of reach must not stop a job that can go on from this disk.
        if here.checkpoint is None:
            raise
        log.warning("copies are not looked at, the job goes on from what this host has: %s", error)
        return here


def _is_newer(source: Source, run: str, here: Where) -> bool:
    """Return whether there is a newer copy of the run ``run`` than this host has, which may have another run.

    Raises:
        CheckpointError: the copies cannot be read, or none of them is intact.
    """
    if here.checkpoint is None:
        return True
    newest = source.candidates()[0].manifest.order
    return form.own_id(here.run) == run and newest > store.order_of(here.checkpoint)


def spec_at(address: str) -> Path:
    """Fetch the spec of the run that an address names, and what was chosen for it, into a temporary folder.

    Returns the path of ``spec.yml`` there.

    Raises:
        CheckpointError: there is none.
    """
    source = Source.of(address)
    source.run()
    for copy in source.candidates():
        folder = Path(tempfile.mkdtemp(prefix="mtrain-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            entries = source.copies.companions(copy).entries
            if "spec.yml" not in entries:
                raise BadCopy("it has no spec.yml")
            for name in SPEC_FILES:
                if name in entries:
                    _download(source.copies.place, f"{copy.name}/run/{name}", entries[name], folder / name)
        except BadCopy as error:
            source.pass_over(copy.name, error)
            continue
        except PlaceError as error:
            raise source.unreadable(error) from error
        return folder / "spec.yml"
    raise CheckpointError(f"{source.label}: no intact copy of a run's spec is there; give the spec with -c")


def states(address: str) -> tuple[Source, Sequence[Copy], dict[str, str]]:
    """Return the copies that an address names, and for each other folder why it is none; for a list of them.

    Raises:
        CheckpointError: there are none, or they cannot be reached.
    """
    source = Source.of(address)
    source.run()
    copies, bad = source.list_copies()
    return source, copies[::-1], bad


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWeights:
    """How trained weights are named: a run, a checkpoint, or a file of weights."""

    run: str | None = None
    checkpoint: str | None = None
    weights: str | None = None

    def fetch(self) -> "TrainedWeights":
        """Return the same as paths on this host: of an address, the best copy is restored into ``runs``.

        Raises:
            CheckpointError: there is no intact copy at an address, or it cannot be reached.
        """
        named = self
        if named.weights is not None and is_address(named.weights):
            named = TrainedWeights(run=named.run, checkpoint=named.weights)
        if named.run is not None and is_address(named.run):
            named = replace(named, run=str(_restore_best(named.run).run))
        if named.checkpoint is not None and is_address(named.checkpoint):
            named = replace(named, checkpoint=str(_restore_best(named.checkpoint).checkpoint))
        return named


def _restore_best(address: str) -> Where:
    return restore_run(address, Path("runs"), best=True)
