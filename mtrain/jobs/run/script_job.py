"""A user's own training script as a job: what is checked before it starts, and which spec it has."""

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mtrain.errors import ScriptError
from mtrain.rank.script.job import digest_of
from mtrain.rank.script.settings import SECTIONS, change_values, is_set, plain_values
from mtrain.rank.script_mode import knows_mtrain
from mtrain.spec import references

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

FRAMEWORK, TENSORFLOW = "backend.options.framework", "tensorflow"


def with_script(loaded: "Loaded", script: Path, arguments: Sequence[str]) -> "Loaded":
    """Return ``loaded`` as the spec of a job that runs ``script``.

    Values that no source has set become those of a plain training loop, because the spec's defaults suit its shipped models.

    Raises:
        ScriptError: there is no such script, or it is not Python.
    """
    from mtrain.spec import config

    try:
        tree = references.parsed_python(script)
    except OSError as error:
        raise ScriptError(
            f"{str(script)[:300]}: {error.strerror}; give the Python script that calls mtrain.session()"
        ) from error
    except ValueError as error:
        raise ScriptError(str(error)) from error
    loaded = _on_its_framework(loaded, tree)
    plain, plain_files = plain_values()
    outside_paths = tuple(
        sorted(
            path
            for path, origin in loaded.provenance.items()
            if path.partition(".")[0] in SECTIONS and origin.file not in plain_files
        )
    )
    spec = change_values(loaded.spec, {path: value for path, value in plain.items() if not is_set(path, outside_paths)})
    call = config.ScriptCall(
        path=script.absolute(),
        arguments=tuple(arguments),
        digest=digest_of(script),
        outside_paths=outside_paths,
        knows_mtrain=knows_mtrain(script),
    )
    return dataclasses.replace(loaded, spec=spec, values=spec.model_dump(mode="json"), name=script.stem, script=call)


def _on_its_framework(loaded: "Loaded", tree: ast.Module) -> "Loaded":
    """Return ``loaded`` with the framework that the script imports, where the backend offers it and nobody has chosen one."""
    field = type(loaded.job.backend_options).model_fields.get("framework")
    if field is None or is_set(FRAMEWORK, loaded.provenance) or TENSORFLOW not in get_args(field.annotation):
        return loaded
    if not imports_tensorflow(tree):
        return loaded
    options = {**loaded.spec.backend.options, "framework": TENSORFLOW}
    return dataclasses.replace(loaded, spec=change_values(loaded.spec, {"backend.options": options}))


def imports_tensorflow(tree: ast.Module) -> bool:
    """Return whether a script imports TensorFlow or Horovod's part for it, and not torch."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    packages = {name.partition(".")[0] for name in imported}
    horovods = {name.split(".")[1] for name in imported if name.startswith("horovod.")}
    return "torch" not in packages | horovods and bool(
        {"tensorflow", "tf_keras"} & packages or {"tensorflow", "keras"} & horovods
    )
