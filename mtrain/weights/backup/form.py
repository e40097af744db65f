"""The form of a run's copies at an address, and what of it is believed.

::

    ADDRESS/<run>/run.json                            the run's id, so that another run of the same name does not mix in
    ADDRESS/<run>/step-00001200/weights.safetensors ...    the files of the checkpoint
                                run/spec.yml ...      what the run folder needs besides
                                COPY.json             sizes and SHA-256 of those, of which run
                                MANIFEST.json         the checkpoint's own, written last: a copy without it is torn

Nobody who can write to the address is trusted: only names that are listed here are read, sizes are limited, and every
byte is compared with its digest.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import format as files
from mtrain.errors import MtrainError
from mtrain.spec import outputs
from mtrain.spec.files import parse_json, read_bytes

FORMAT = 1
RUN = "run.json"
COPY = "COPY.json"
# A run is told by a random id, because another one may have the same name.
OWN = "copies.json"
"""File of the run folder that holds the run's id."""
STEP = re.compile(r"step-\d{8,12}")
_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_MANIFEST_BYTES = 1 << 20
"""Largest MANIFEST.json, COPY.json or run.json that is read, in bytes."""
RUN_FILES = {
    "spec.yml": 4 << 20,
    "spec.json": 16 << 20,
    "chosen.json": 1 << 20,
    "metrics.jsonl": 16 << 30,
    "mlflow.json": 1 << 20,
    "wandb.json": 1 << 20,
}
"""File of the run folder that goes along, and its largest size in bytes."""


class BadCopy(MtrainError):
    """A copy is torn, damaged, or not what mtrain writes; the message is one clause."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size in bytes and the SHA-256 of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        """Return the entry of a file with this content."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The manifest of a checkpoint, checked."""

    content: bytes
    entries: Mapping[str, FileDigest]
    update: int
    serial: int
    score: float

    @property
    def order(self) -> tuple[int, int]:
        """Return a sort key: the copy of the newest checkpoint is last."""
        return self.serial, self.update

    @property
    def size(self) -> int:
        """Return the size of the checkpoint's files in bytes."""
        return sum(entry.size for entry in self.entries.values())

    @classmethod
    def of(cls, content: bytes) -> "Manifest":
        """Read a manifest.

        Raises:
            BadCopy: it is not what mtrain writes, or lists other files than those of a checkpoint.
        """
        manifest = files.intact_manifest(content)
        if not manifest:
            raise BadCopy(f"its {files.MANIFEST} is damaged or of another format")
        entries = _entries(manifest["files"], files.MANIFEST)
        # Names become paths when a copy is fetched, so only those that are known are taken.
        if set(entries) != {*files.ARRAYS.values(), files.STATE}:
            raise BadCopy(f"its {files.MANIFEST} lists other files than those of a checkpoint")
        update, serial = manifest.get("update"), manifest.get("serial")
        if not isinstance(update, int) or not isinstance(serial, int):
            raise BadCopy(f"its {files.MANIFEST} has no update")
        return cls(content=content, entries=entries, update=update, serial=serial, score=files.score_in(manifest))


def _entries(listed: Any, where: str) -> dict[str, FileDigest]:
    if not isinstance(listed, dict):
        raise BadCopy(f"its {where} lists no files")
    entries = {}
    for name, entry in listed.items():
        size = entry.get("size_bytes") if isinstance(entry, dict) else None
        digest = str(entry.get("sha256")) if isinstance(entry, dict) else ""
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not _DIGEST.fullmatch(digest):
            raise BadCopy(f"its {where} is damaged at {ascii(name)[:80]}")
        entries[name] = FileDigest(size, digest)
    return entries


@dataclass(frozen=True, slots=True)
class Companions:
    """The content of ``COPY.json``: the facts and files that go with the copy of a checkpoint."""

    run: str
    """Id of the run."""
    manifest: str
    """SHA-256 of the copy's MANIFEST.json."""
    entries: Mapping[str, FileDigest]
    """Files of the run folder, below ``run/``."""

    def content(self) -> bytes:
        """Return the content of the file."""
        listed = {name: {"size_bytes": entry.size, "sha256": entry.sha256} for name, entry in self.entries.items()}
        body = {"format": FORMAT, "run": self.run, "manifest": self.manifest, "files": listed}
        return json.dumps(body, indent=1).encode()

    @classmethod
    def of(cls, content: bytes) -> "Companions":
        """Read the file.

        Raises:
            BadCopy: it is not what mtrain writes.
        """
        body = _parse_form(content, COPY)
        entries = _entries(body.get("files"), COPY)
        if any(name not in RUN_FILES or entry.size > RUN_FILES[name] for name, entry in entries.items()):
            raise BadCopy(f"its {COPY} lists a file that does not go along, or one that is too large")
        return cls(id_of(body.get("run"), COPY), str(body.get("manifest")), entries)


def run_content(run: str) -> bytes:
    """Return the content of ``run.json``."""
    return json.dumps({"format": FORMAT, "id": run}).encode()


def run_in(content: bytes) -> str:
    """Return the run's id in ``run.json`` or ``copies.json``.

    Raises:
        BadCopy: it has none.
    """
    return id_of(_parse_form(content, RUN).get("id"), RUN)


def id_of(value: Any, where: str) -> str:
    """Return the id of a run, checked."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise BadCopy(f"its {where} has no id of a run")
    return value


def _parse_form(content: bytes, where: str) -> dict[str, Any]:
    try:
        body = parse_json(content)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadCopy(f"its {where} is damaged or of another format")
    return body


def own_id(run_dir: Path) -> str | None:
    """Return the id of the run in ``run_dir``; None if it has none yet."""
    try:
        return run_in(read_bytes(run_dir / OWN, limit=MAX_MANIFEST_BYTES))
    except (OSError, BadCopy):
        return None


def write_id(run_dir: Path, run: str | None = None) -> str:
    """Write the id of a run (None: a new one) into its folder, and return it."""
    run = run or uuid.uuid4().hex
    outputs.write_bytes(run_dir / OWN, run_content(run))
    return run
