"""Read config.json of a model of transformers, which a stranger may have written, before transformers sees it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.files import parse_json, read_bytes

CONFIG = "config.json"
MAX_BYTES = 4 << 20
"""Largest configuration that is read; those with thousands of classes have some hundred kilobytes."""
MAX_INDEX_BYTES = 32 << 20
"""Largest list of the files of weights."""
_LAYERS = re.compile(r"(^|_)n?_?layers?$")
_SIZES = {
    "hidden_size",
    "d_model",
    "n_embd",
    "vocab_size",
    "num_attention_heads",
    "n_head",
    "num_hidden_layers",
    "n_layer",
}
_MAX_LAYERS, _MAX_SIZE = 10_000, 1 << 24


def read_entries(file: Path, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the entries of a JSON file in the folder of a model.

    Raises:
        SpecError: It cannot be read, or holds no entries.
    """
    try:
        entries = parse_json(read_bytes(file, limit=limit))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"model.options.path: {file} cannot be read: {getattr(error, 'strerror', None) or error}; copy it again"
        ) from error
    if not isinstance(entries, dict):
        raise SpecError(f"model.options.path: {file} is no configuration (JSON with keys and values); copy it again")
    return entries


def entries_for_transformers(path: str) -> dict[str, Any]:
    """Return the entries of the configuration at ``path``, a folder or a file, that say what the model is.

    Those are left out that lead transformers to other files, or to code on the network.

    Raises:
        SpecError: see ``read_entries``.
    """
    given = Path(path).expanduser()
    entries = read_entries(given if given.is_file() else given / CONFIG)
    left_out = {
        "transformers_weights",
        "attn_implementation",
        "experts_implementation",
        "auto_map",
        "configuration_files",
    }
    return {name: value for name, value in entries.items() if not name.startswith("_") and name not in left_out}


def check_sizes(entries: Mapping[str, Any], *, path: str) -> None:
    """Refuse a configuration of more layers or larger ones than any model has, or of none, before anything is built.

    Raises:
        SpecError: It is such a one.
    """
    inner = [value for value in entries.values() if isinstance(value, Mapping)]
    for part in (entries, *inner):
        for name, value in part.items():
            is_size = name in _SIZES
            if value is None or not (is_size or (_LAYERS.search(name) and type(value) in (int, float))):
                continue
            least, most = int(is_size), _MAX_LAYERS if _LAYERS.search(name) else _MAX_SIZE
            if type(value) is not int or not least <= value <= most:
                raise SpecError(
                    f"model.options: {path}: {name}: {str(value)[:40]} given, expected an integer from {least} to {most}"
                )
