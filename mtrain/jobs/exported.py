"""Models in files that say what they are: safetensors with their spec, and exported models, with which plugins compute.

A plugin of the group ``mtrain.exported`` evaluates and predicts with files of one ending, which is its name: without ranks, and
without the framework that has trained the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces.exported import ExportedFiles
from mtrain.errors import CheckpointError, PluginError
from mtrain.spec import references
from mtrain.spec.registry import Registry

if TYPE_CHECKING:
    from mtrain.spec.config import Source

SUFFIX = ".onnx"
"""Ending of exported models."""


def is_exported(path: str | Path | None) -> bool:
    """Return whether a file of weights is an exported model, by the ending of its name."""
    return path is not None and Path(path).suffix.lower() == SUFFIX


def reader_of(path: Path) -> ExportedFiles:
    """Return the plugin that computes with an exported model.

    Raises:
        PluginError: it is not installed; the message names the package and the command that installs it.
    """
    try:
        reader: ExportedFiles = Registry.read().make("exported", SUFFIX.removeprefix("."), {}, path="exported")
    except PluginError as error:
        raise PluginError(f"{path}: {error}") from error
    return reader


def config_of(config: "Source", weights: str | None) -> "Source":
    """Return the spec to read: ``config``; without one, that in the file ``weights``, if it carries one.

    Raises:
        CheckpointError: the file cannot be used.
    """
    if config is not None or weights is None:
        return config
    return reader_of(Path(weights)).spec_values(Path(weights)) if is_exported(weights) else spec_with(weights)


def spec_with(weights: str) -> dict[str, Any] | None:
    """Return the spec that a file of weights carries, as values; None: it carries none.

    Raises:
        CheckpointError: the file cannot be read, or see ``carried_spec``.
    """
    from mtrain.weights.reading import read

    spec = read(Path(weights)).spec if Path(weights).is_file() else None
    return carried_spec(spec, name=weights) if spec else None


def carried_spec(spec: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the part of a spec that a file carries as values that run no code.

    Where and how its job ran is left out, and so are reporters. A file may come from anybody, so code that its spec names
    is not run.

    Raises:
        CheckpointError: the spec names code of a user's own, or is damaged.
    """
    left_out = {"plugins", "backend", "cluster", "launcher", "report", "checkpoint"}
    values = {key: value for key, value in spec.items() if key not in left_out}
    odd = [key for key in ("data", "model") if not isinstance(values.get(key) or {}, Mapping)]
    if odd:
        raise CheckpointError(f"{name}: its spec has no section {odd[0]} with settings; export the model again")
    named = [(values.get("data") or {}).get("format"), (values.get("model") or {}).get("name")]
    own = next((text for text in named if references.is_reference(text)), None)
    if own is not None:
        raise CheckpointError(
            f"{name}: its spec names code of a user's own, {own}, which is not run from a file; give -c SPEC"
        )
    values["model"] = {**(values.get("model") or {}), "weights": None, "weights_key": None}
    return values
