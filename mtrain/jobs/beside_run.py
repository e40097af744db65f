"""A spec that is given together with trained weights: the spec counts, and what differs from the one of the weights is told."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.format import read_description
from mtrain.errors import UsageError
from mtrain.spec import terminal
from mtrain.spec.disclosure import shorten
from mtrain.spec.references import is_reference
from mtrain.spec.yaml_reader import flow

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

SECTIONS = ("model.", "data.", "evaluate.")
"""Beginnings of paths on which results of trained weights depend."""
OF_TRAINING = (
    "model.weights", "model.pruned", "data.train", "data.augment.", "data.workers", "data.cache", "data.image_weights",
    "evaluate.every_", "evaluate.at_end",
)  # fmt: skip
"""Beginnings of paths among them that only training reads."""
MOST_TOLD = 12


def note_on(loaded: "Loaded", weights: Path) -> str | None:
    """Return a sentence that says that the spec ``loaded`` is used, and how it differs from that of a checkpoint.

    Args:
        loaded: the spec that was given beside the weights.
        weights: a checkpoint or a run folder; None is returned for others and for damaged ones, which their reader names.

    Raises:
        UsageError: the checkpoint is one of another model.
    """
    from mtrain.spec.schema import leaves

    inside = weights / "checkpoints"
    found = (store.best(inside) or store.newest(inside)) if inside.is_dir() else weights
    try:
        trained: Mapping[str, Any] = read_description(found or weights).get("spec") or {}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    before, now = dict(leaves(trained)), dict(leaves(loaded.values))
    if not before:
        return None
    if not _is_same_model(str(before.get("model.name")), str(now.get("model.name"))):
        raise UsageError(
            f"{loaded.source}: describes the model {now.get('model.name')}, but {weights} was trained as "
            f"{before.get('model.name')}; leave -c out to use the spec of the run, or give the weights of this model"
        )
    changed = [path for path in sorted({*before, *now}) if _matters(path) and before.get(path) != now.get(path)]
    told = [
        f"{path} {flow(before.get(path))} there, {flow(now.get(path))} here ({loaded.origin(path)})"
        for path in changed[:MOST_TOLD]
    ]
    more = [f"and {len(changed) - MOST_TOLD} more"] if len(changed) > MOST_TOLD else []
    differences = "; ".join([*told, *more]) if told else "they agree on model, data and evaluation"
    return f"the spec is {loaded.source}, not that of {weights}: {differences}"


def say(loaded: "Loaded", weights: Path) -> None:
    """Print what ``note_on`` returns to standard error, for commands whose ranks show nothing.

    Raises:
        UsageError: the checkpoint is one of another model.
    """
    if note := note_on(loaded, weights):
        terminal.say(note, err=True)


def _is_same_model(before: str, now: str) -> bool:
    """Return whether two names are of one model; that of a user's own may be in another folder now."""
    if is_reference(before) and is_reference(now):
        return shorten(before) == shorten(now)
    return before == now


def _matters(path: str) -> bool:
    return path.startswith(SECTIONS) and not path.startswith(OF_TRAINING)
