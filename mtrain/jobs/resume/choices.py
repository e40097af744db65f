"""Write what somebody chose for a run into its folder, and read it back when the run is resumed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.errors import CheckpointError
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes
from mtrain.spec.sources import FOREIGN
from mtrain.system.runfolder import CHOSEN, RunFolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

TYPED = ("override", "flag", "run")
"""Kinds of origins of values that somebody chose for one run."""
VARIABLE = "MTRAIN_"
PLACE = tuple(
    f"cluster.{key}" for key in ("node_rank", "master_addr", "master_port", "control_port", "start_port", "interface")
)
"""Paths that describe the place of one host in one start."""
HOSTS = ("cluster.ips", "cluster.slots")
"""Paths that name the hosts of a start."""
OF_START = (*PLACE, *HOSTS, "cluster.name")
"""Paths of facts about hosts that hold for one start."""
NOT_TAKEN = ("report.name", "report.dir")
"""Paths whose values follow from the folder that is resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The values that somebody chose for a run, as its folder says."""

    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    """The whole spec of the run."""
    paths: tuple[str, ...] = ()
    """Dotted paths of the values that were chosen."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the user's own code -> SHA-256."""
    script: str | None = None
    """Path of the user's script; None: the run was made by ``mtrain train``."""
    arguments: str | None = None
    """SHA-256 of the script's arguments."""
    found: tuple[str, ...] = ()
    """Dotted paths of values that the scheduler gave in which the run was started."""
    is_known: bool = False
    """Whether the folder says what was chosen."""

    @property
    def is_of_script(self) -> bool:
        """Return whether the run was made by a script: its spec has no model then."""
        return self.script is not None if self.is_known else "model" not in self.values

    def chosen_values(self) -> dict[str, Any]:
        """Return the chosen values by dotted path, without what follows from the folder."""
        return {path: value_at(self.values, path) for path in self.paths if path not in NOT_TAKEN}


def describe(loaded: "Loaded", files: Iterable[str]) -> dict[str, Any]:
    """Return the choices of a job for the file ``CHOSEN`` of its run folder, which ``read`` reads back.

    ``files``: those of the user's own code.
    """
    return {
        "paths": list(chosen_paths(loaded)),
        "files": {file: digest for file in files if (digest := digest_of(Path(file))) is not None},
        "script": None if loaded.script is None else str(loaded.script.path),
        "arguments": None if loaded.script is None else digest_of_words(loaded.script.arguments),
        "found": _found_paths(loaded),
    }


def read(folder: Path) -> Chosen | None:
    """Return what was chosen for the run in ``folder``; None if the folder holds no spec.

    Without the file ``CHOSEN``, only the spec is known.

    Raises:
        CheckpointError: a file of the folder cannot be read.
    """
    run = RunFolder(folder)
    if not run.spec_json.is_file():
        return None
    values = _read_mapping(run.spec_json)
    facts = _read_mapping(folder / CHOSEN) if (folder / CHOSEN).is_file() else {}
    script, arguments = facts.get("script"), facts.get("arguments")
    return Chosen(
        folder=folder,
        values=values,
        paths=_texts(facts.get("paths")),
        files={str(file): str(digest) for file, digest in _mapping(facts.get("files")).items()},
        script=script if isinstance(script, str) else None,
        arguments=arguments if isinstance(arguments, str) else None,
        found=_texts(facts.get("found")),
        is_known=bool(facts),
    )


def chosen_paths(loaded: "Loaded") -> Iterable[str]:
    """Yield the paths of the values that somebody chose for this run, each once."""
    from mtrain.rank.script.settings import plain_values

    plain_files = None if loaded.script is None else plain_values()[1]
    paths: dict[str, None] = {}
    for path, origin in loaded.provenance.items():
        typed = origin.kind in TYPED or (origin.kind == "environment" and origin.text.startswith(VARIABLE))
        of_the_spec = plain_files is not None and origin.kind in ("base", "file") and origin.file not in plain_files
        if typed or of_the_spec:
            paths[_without_places(path)] = None
    # A section as a whole says nothing that its values do not say; nor does a fact about hosts that is left open.
    return [
        path
        for path in paths
        if (not isinstance(value := value_at(loaded.values, path), Mapping) or not value)
        and not (loaded.origin(path).kind == "run" and path in OF_START and value in (None, [], "auto"))
    ]


def _found_paths(loaded: "Loaded") -> list[str]:
    """Return the paths of the values that the scheduler gave in whose allocation this process runs."""
    origins = loaded.provenance.items()
    given = {path for path, origin in origins if origin.kind == "environment"}
    of_users = {path for path in given if loaded.origin(path).text.startswith((VARIABLE, *FOREIGN))}
    return sorted({_without_places(path) for path in given - of_users})


def _without_places(path: str) -> str:
    """Return the path of the list, where ``path`` leads into one."""
    keys = path.split(".")
    first = next((place for place, key in enumerate(keys) if key.isdigit()), len(keys))
    return ".".join(keys[:first])


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path of nested mappings; None if there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _read_mapping(file: Path) -> Mapping[str, Any]:
    try:
        return _mapping(parse_json(read_bytes(file, limit=MAX_OWN_BYTES)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; restore the file, or start a new run") from error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def digest_of_words(words: Sequence[str]) -> str:
    """Return the SHA-256 of a script's arguments, which may hold a secret."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()


def digest_of(file: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(file, limit=MAX_OWN_BYTES)).hexdigest()
    except OSError:
        return None
