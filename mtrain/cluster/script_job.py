"""A user's own training script as a job: what is checked before it starts, and which spec it has."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import ScriptError
from mtrain.script.settings import PLAIN, SECTIONS, changed, plain_values

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded
    from mtrain.spec.model import Spec


def with_script(loaded: "Loaded", script: Path, arguments: Sequence[str]) -> "Loaded":
    """Return ``loaded`` as the spec of a job that runs ``script``.

    Values that no source has set become those of a plain training loop, because the spec's defaults suit its shipped models.

    Raises:
        ScriptError: there is no such script, or it is not Python.
    """
    from mtrain.spec import config

    try:
        content = script.read_bytes()
    except OSError as error:
        raise ScriptError(
            f"{script}: {'is a folder' if script.is_dir() else error.strerror}; give the Python script that calls mtrain.session()"
        ) from error
    try:
        compile(content, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        place = f"{script}:{error.lineno}" if isinstance(error, SyntaxError) else str(script)
        raise ScriptError(f"{place}: is not valid Python: {getattr(error, 'msg', error)}") from error
    outside_paths = tuple(
        sorted(
            path
            for path, origin in loaded.provenance.items()
            if path.partition(".")[0] in SECTIONS and Path(origin.file or "").name != Path(PLAIN).name
        )
    )
    spec = _with_plain_defaults(loaded, outside_paths)
    call = config.ScriptCall(
        path=script.absolute(),
        arguments=tuple(arguments),
        digest=hashlib.sha256(content).hexdigest(),
        outside_paths=outside_paths,
    )
    return dataclasses.replace(loaded, spec=spec, values=spec.model_dump(mode="json"), name=script.stem, script=call)


def _with_plain_defaults(loaded: "Loaded", outside_paths: Sequence[str]) -> "Spec":
    plain = {
        path: value
        for path, value in plain_values().items()
        if not any(name == path or name.startswith((f"{path}.", path + "[")) for name in outside_paths)
    }
    spec: Spec = changed(loaded.spec, plain)
    return spec
