"""Which types of models the installed transformers knows, read from its files: to import them would load torch.

The starter of a job loads no framework, and refuses what no rank could build before there is a run folder.
"""

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.files import MAX_OWN_BYTES, read_bytes
from mtrain.spec.suggest import hint
from mtrain_language.folders import refuse_type

TYPES = ("auto_mappings.py", "CONFIG_MAPPING_NAMES")
CAUSAL = ("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
"""File in ``transformers/models/auto`` and table in it: type of model -> class."""


def check(entries: Mapping[str, Any], *, path: str) -> None:
    """Refuse a configuration of a type that transformers does not know, or that is no causal language model.

    Where transformers is not installed here, or has other files, the ranks find out.

    Raises:
        SpecError: It is of such a type.
    """
    kind = entries.get("model_type")
    causal, types = _table(*CAUSAL), _table(*TYPES)
    if not isinstance(kind, str) or causal is None or types is None or kind in causal:
        return
    if kind not in types:
        raise SpecError(unknown(kind, list(types), path=path))
    refuse_type(kind, entries.get("architectures"), path=path)


def unknown(kind: str, types: list[str], *, path: str) -> str:
    """Return the message on a type that transformers does not know."""
    meant = hint(kind, types)
    return (
        f"model.options: {path}: {kind!r} is no type of model of the installed transformers{meant}; correct model_type, or install a "
        "newer transformers"
    )


def _table(file: str, name: str) -> Mapping[str, Any] | None:
    """Return a table of transformers; None where it is not found."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        text = read_bytes(Path(spec.origin).parent / "models" / "auto" / file, limit=MAX_OWN_BYTES)
        for node in ast.parse(text).body:
            # The table is read as text: importing it would import torch.
            match node:
                case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[pairs])) if found == name:
                    return dict(ast.literal_eval(pairs))
    except (OSError, SyntaxError, ValueError):
        pass
    return None
