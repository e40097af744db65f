"""A user's own training script as a job: what is checked before it starts, and which spec it has."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import ScriptError
from mtrain.rank.script.settings import SECTIONS, changed, is_set, plain_values
from mtrain.rank.script_mode import digest_of
from mtrain.spec import references

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def with_script(loaded: "Loaded", script: Path, arguments: Sequence[str]) -> "Loaded":
    """Return ``loaded`` as the spec of a job that runs ``script``.

    Values that no source has set become those of a plain training loop, because the spec's defaults suit its shipped models.

    Raises:
        ScriptError: there is no such script, or it is not Python.
    """
    from mtrain.spec import config

    try:
        references.parsed_python(script)
    except OSError as error:
        raise ScriptError(
            f"{str(script)[:300]}: {error.strerror}; give the Python script that calls mtrain.session()"
        ) from error
    except ValueError as error:
        raise ScriptError(str(error)) from error
    plain, plain_files = plain_values()
    outside_paths = tuple(
        sorted(
            path
            for path, origin in loaded.provenance.items()
            if path.partition(".")[0] in SECTIONS and origin.file not in plain_files
        )
    )
    spec = changed(loaded.spec, {path: value for path, value in plain.items() if not is_set(path, outside_paths)})
    call = config.ScriptCall(
        path=script.absolute(),
        arguments=tuple(arguments),
        digest=digest_of(script),
        outside_paths=outside_paths,
    )
    return dataclasses.replace(loaded, spec=spec, values=spec.model_dump(mode="json"), name=script.stem, script=call)
