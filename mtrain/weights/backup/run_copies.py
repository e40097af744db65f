"""The copies of one run at an address: list them, add one, delete those that are not kept."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtrain.core.checkpoint.format import MANIFEST
from mtrain.spec.files import open_file, read_bytes
from mtrain.weights.backup import form
from mtrain.weights.backup.form import BadCopy, Companions, FileDigest, Manifest
from mtrain.weights.backup.place import PlaceError, StorageFolder

Check = Literal["read", "size"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy with an intact manifest; its files were not read."""

    name: str
    """For example ``step-00001200``."""
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepingRule:
    """Which copies are kept, and how each is verified."""

    newest: int
    best: int
    check: Check


class RunCopies:
    """The copies of one run."""

    def __init__(self, place: StorageFolder) -> None:
        self.place = place

    def run(self) -> str | None:
        """Return the id of the run whose copies these are; None: there are none yet.

        Raises:
            PlaceError: the place cannot be reached.
            BadCopy: there is something else.
        """
        try:
            return form.run_in(self.place.read(form.RUN, limit=form.MAX_MANIFEST_BYTES))
        except PlaceError as error:
            if error.missing:
                return None
            raise

    def claim(self, run: str) -> None:
        """Make this the place of the run ``run``.

        Raises:
            PlaceError: the place cannot be reached or written.
            BadCopy: it has the copies of another run.
        """
        # Two runs of one name would delete each other's copies as old ones.
        there = self.run()
        if there is None:
            self.place.put(form.RUN, form.run_content(run))
        elif there != run:
            raise BadCopy(
                "the copies there are those of another run of this name; set report.name, or another checkpoint.copy_to"
            )

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of all copies that have a manifest, and of torn ones.

        Raises:
            PlaceError: the place cannot be reached.
        """
        found = self.place.sizes()
        steps = sorted({name.partition("/")[0] for name in found if form.STEP.fullmatch(name.partition("/")[0])})
        # The manifest is written last, so a copy without one was interrupted.
        whole = [step for step in steps if f"{step}/{MANIFEST}" in found]
        return whole, [step for step in steps if step not in whole]

    def list_copies(self) -> tuple[list[Copy], dict[str, str]]:
        """Return the copies, the newest first, and for each other folder why it is none.

        Raises:
            PlaceError: the place cannot be reached.
        """
        whole, torn = self.names()
        copies, bad = [], dict.fromkeys(torn, f"torn: it has no {MANIFEST}")
        for name in whole:
            try:
                copies.append(Copy(name, self.manifest(name)))
            except BadCopy as error:
                bad[name] = str(error)
        return sorted(copies, key=lambda copy: copy.manifest.order, reverse=True), bad

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of one copy.

        Raises:
            PlaceError: the place cannot be reached.
            BadCopy: there is none, or it is damaged.
        """
        return Manifest.of(self._small(f"{name}/{MANIFEST}"))

    def companions(self, copy: Copy) -> Companions:
        """Return what goes with a copy.

        Raises:
            PlaceError: the place cannot be reached.
            BadCopy: it is missing, damaged, or that of another copy.
        """
        companions = Companions.of(self._small(f"{copy.name}/{form.COPY}"))
        if companions.manifest != FileDigest.of(copy.manifest.content).sha256:
            raise BadCopy(f"its {form.COPY} belongs to another copy")
        return companions

    def _small(self, name: str) -> bytes:
        try:
            size = self.place.size(name)
            if size > form.MAX_MANIFEST_BYTES:
                raise BadCopy(f"its {name.rpartition('/')[2]} has {size} bytes, more than are read")
            return self.place.read(name, limit=form.MAX_MANIFEST_BYTES)
        except PlaceError as error:
            if error.missing:
                raise BadCopy(f"it has no {name.rpartition('/')[2]}") from None
            raise

    def problems(self, copy: Copy) -> list[str]:
        """Read every byte of a copy; return its problems, empty if it is intact.

        Raises:
            PlaceError: the place cannot be reached.
        """
        problems = []
        try:
            companions = self.companions(copy)
            entries = {f"run/{name}": entry for name, entry in companions.entries.items()} | dict(copy.manifest.entries)
        except BadCopy as error:
            return [str(error)]
        for name, entry in entries.items():
            try:
                self._verify(f"{copy.name}/{name}", entry, check="read")
            except BadCopy as error:
                problems.append(str(error))
        return problems

    # ---------------------------------------------------------------------------------------------------------- adding
    def add(self, checkpoint: Path, run_dir: Path, run: str, rule: KeepingRule, *, name: str | None = None) -> int:
        """Copy a checkpoint with what its run folder needs, verify it, and delete what is not kept.

        ``name``: that of the copy, where the checkpoint's folder has another one. Returns the bytes that were written; 0 if
        the copy was there already.

        Raises:
            FileNotFoundError: the checkpoint was deleted in the meantime.
            PlaceError: the place cannot be reached or written.
            BadCopy: what was written is not what arrived.
        """
        content = read_bytes(checkpoint / MANIFEST, limit=form.MAX_MANIFEST_BYTES)
        manifest, name = Manifest.of(content), name or checkpoint.name
        if self._has(name, content):
            return 0
        with ExitStack() as opened:
            # Open files outlive the checkpoint's deletion (checkpoint.keep_last); their names below /proc are paths.
            held = {each: opened.enter_context(open_file(checkpoint / each)) for each in manifest.entries}
            opened.push(lambda kind, error, trace: self._make_room(name, error))
            for each, entry in manifest.entries.items():
                self.place.upload(f"{name}/{each}", Path(f"/proc/self/fd/{held[each].fileno()}"))
                self._verify(f"{name}/{each}", entry, check=rule.check)
            written = self._finish(name, content, dict(_companions(run_dir)), run=run, check=rule.check)
        self._retain(name, rule)
        return manifest.size + written

    def _has(self, name: str, content: bytes) -> bool:
        """Return whether the copy ``name`` has this manifest. Another one is deleted, so that the copy counts as torn."""
        try:
            there = self._small(f"{name}/{MANIFEST}")
        except BadCopy:  # none, or one that is no manifest: nobody takes the copy
            return False
        # The checkpoint was written anew: until the copy is complete it must not count as that of the former one.
        if there != content:
            self.place.remove(f"{name}/{MANIFEST}")
        return there == content

    def _finish(self, name: str, content: bytes, companions: Mapping[str, bytes], *, run: str, check: Check) -> int:
        """Write what goes along, and last the manifest, ``content``; return how many bytes that is."""
        listed = {each: FileDigest.of(text) for each, text in companions.items()}
        last = {
            **{f"run/{each}": text for each, text in companions.items()},
            form.COPY: Companions(run, FileDigest.of(content).sha256, listed).content(),
            MANIFEST: content,
        }
        for each, text in last.items():
            self.place.put(f"{name}/{each}", text)
            self._verify(f"{name}/{each}", FileDigest.of(text), check=check)
        return sum(len(text) for text in last.values())

    def _make_room(self, name: str, error: BaseException | None) -> None:
        """Delete the torn copy where there is no room for it: it would keep the next one from fitting as well."""
        if isinstance(error, PlaceError) and error.full:
            with contextlib.suppress(PlaceError):
                self.place.remove_folder(name)

    def _verify(self, name: str, entry: FileDigest, *, check: Check) -> None:
        """Compare an object at the address with what was written.

        Raises:
            BadCopy: they differ.
        """
        try:
            size = self.place.size(name)
            wrong = f"{size} bytes, expected {entry.size}" if size != entry.size else ""
            if not wrong and check == "read" and self.place.digest(name, size=entry.size) != entry.sha256:
                wrong = "its SHA-256 is not the one written (bits changed)"
        except PlaceError as error:
            if not error.missing:
                raise
            wrong = "is missing"
        if wrong:
            raise BadCopy(f"{name.partition('/')[2]}: {wrong}")

    def _retain(self, new: str, rule: KeepingRule) -> None:
        """Delete the copies that no rule keeps, and torn ones. ``new`` has just been verified and stays."""
        copies, bad = self.list_copies()
        kept = {new, *(copy.name for copy in copies[: rule.newest])}
        kept.update(copy.name for copy in _by_score(copies)[: rule.best])
        for name in (*(copy.name for copy in copies), *bad):
            if name not in kept:
                self.place.remove(f"{name}/{MANIFEST}")  # first: a deletion that is interrupted leaves a torn copy
                self.place.remove_folder(name)


def _companions(run_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a run folder that go along: name and content."""
    for name, limit in form.RUN_FILES.items():
        try:
            content = read_bytes(run_dir / name, limit=limit)
        except OSError:
            continue
        if name == "metrics.jsonl":  # Its last line may be in the middle of being written.
            content = content[: content.rfind(b"\n") + 1]
        yield name, content


def newest_first(copies: Sequence[Copy], *, best: bool) -> list[Copy]:
    """Return the copies in the order in which they are tried: the newest first, or with ``best`` the best one."""
    if not best:
        return list(copies)
    scored = _by_score(copies)
    return [*scored, *(copy for copy in copies if copy not in scored)]


def _by_score(copies: Sequence[Copy]) -> list[Copy]:
    """Return the copies that have a score, the best first."""
    scored = [copy for copy in copies if copy.manifest.score > -math.inf]
    # Of equal scores the first one, as ``checkpoint.keep_best`` has it.
    return sorted(scored, key=lambda copy: (-copy.manifest.score, copy.manifest.update))


def folder_at(address: str, run_dir: Path) -> StorageFolder:
    """Return where the copies of the run in ``run_dir`` are, below ``checkpoint.copy_to``."""
    return StorageFolder(address).inside(run_dir.name)
