"""Weights of modules that mtrain does not describe: those of a script, and of a model of a user's own.

Only the user's code can build such a module. Its arrays have the names and shapes of the module's ``state_dict``, whichever
backend has trained it, so they leave as they are.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.format import read_description
from mtrain.errors import UsageError
from mtrain.spec.references import is_reference

Own: TypeAlias = Literal["script", "model", "plugin"]
WORDS: Mapping[Own, str] = {
    "script": "the run of a script of your own",
    "model": "the run of a model of your own",
    "plugin": "the run of a model of another library",
}
NATIVE = "native"
"""Key in ``extra`` of a checkpoint whose model plugin builds a module of another library; see ``Model.native``."""


def own_kind(spec: Mapping[str, Any], extra: Mapping[str, Any]) -> Own | None:
    """Return whose module a checkpoint holds, from its ``spec`` and ``extra``; None: one whose arrays mtrain knows."""
    if "script" in extra:
        return "script"
    if is_reference((spec.get("model") or {}).get("name")):
        return "model"
    return "plugin" if extra.get(NATIVE) else None


def own_kind_of(weights: Path) -> Own | None:
    """Return whose module a checkpoint folder, or the best checkpoint of a run folder, holds; None for anything else."""
    inside = weights / "checkpoints"
    found = store.best(inside) or store.newest(inside) if inside.is_dir() else weights
    try:
        body = read_description(found or weights)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None  # no checkpoint, or a damaged one, which whoever reads it says better
    return own_kind(body.get("spec") or {}, body.get("extra") or {})


def refuse_own(weights: Path, what: str, *, kinds: tuple[Own, ...] = ("script", "model")) -> None:
    """Refuse a checkpoint of a user's own module for a command that has to build the network.

    Args:
        weights: A checkpoint folder, or a run folder; anything else is let pass.
        what: The command and what it needs, such as ``predict: needs a model plugin``.
        kinds: Which modules are refused.

    Raises:
        UsageError: it is one. The message says how the weights leave.
    """
    kind = own_kind_of(weights)
    if kind is None or kind not in kinds:
        return
    run = weights.parent.parent if weights.parent.name == "checkpoints" else weights
    raise UsageError(
        f"{what}; {run} is {WORDS[kind]}, which only your code can build. Write its weights with "
        f"`mtrain weights export {shlex.quote(str(run))} --to {shlex.quote(run.name)}.pt`, and load them there "
        "with your framework's own load and model.load_state_dict"
    )
