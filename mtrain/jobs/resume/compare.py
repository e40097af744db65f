"""Say how the spec of a job differs from that of a run: of the run that goes on, or of the one whose weights are used.

The spec that is given counts, and what differs is told.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.checkpoint.format import read_description
from mtrain.errors import UsageError
from mtrain.jobs.resume.choices import Chosen, chosen_paths, digest_of, digest_of_words, value_at
from mtrain.jobs.resume.find import best_of
from mtrain.spec import terminal
from mtrain.spec.disclosure import shorten
from mtrain.spec.references import is_reference
from mtrain.spec.schema import leaves
from mtrain.spec.yaml_reader import flow

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, ScriptCall

SECTIONS = ("model.", "data.", "evaluate.")
"""Beginnings of paths on which results of trained weights depend."""
OF_TRAINING = (
    "model.weights", "model.pruned", "data.train", "data.augment.", "data.workers", "data.cache", "data.image_weights",
    "evaluate.every_", "evaluate.at_end",
)  # fmt: skip
"""Beginnings of paths among them that only training reads."""
NOT_TOLD = ("report.", "checkpoint.", "cluster.", "launcher.", "plugins")
"""Beginnings of paths whose changes do not matter for what the job learns."""
TOLD_TOO = ("cluster.nproc_per_node",)
MOST_TOLD = 12
"""Largest number of changed values that are named."""


def list_changes(
    loaded: "Loaded", before: Mapping[str, Any], now: Mapping[str, Any], *, matters: Callable[[str], bool]
) -> str:
    """Return each value that matters and is not as before, dotted path by dotted path, in words; empty: there is none."""
    changed = [path for path in sorted({*before, *now}) if matters(path) and before.get(path) != now.get(path)]
    told = [
        f"{path} {flow(before.get(path))} there, {flow(now.get(path))} here ({loaded.origin(path)})"
        for path in changed[:MOST_TOLD]
    ]
    return "; ".join([*told, *([f"and {len(changed) - MOST_TOLD} more"] if len(changed) > MOST_TOLD else [])])


def list_notes(loaded: "Loaded", chosen: Chosen, *, shown: str) -> list[str]:
    """Return a sentence on the values, and one on the files, that are not those of the run which goes on."""
    notes = []
    before, now = dict(leaves(chosen.values)), dict(leaves(loaded.values))
    if loaded.script is not None:  # the script sets the others
        paths = {*chosen.paths, *chosen_paths(loaded)}
        before, now = ({path: value_at(values, path) for path in paths} for values in (chosen.values, loaded.values))
    if changes := list_changes(loaded, before, now, matters=_is_told):
        notes.append(f"not as in the run {shown}: {changes}")
    stale = [file for file, digest in chosen.files.items() if digest_of(Path(file)) not in (None, digest)]
    if stale:
        notes.append(f"changed since the run {shown} was started: {', '.join(stale)}")
    return notes if loaded.script is None else [*notes, *_script_notes(loaded.script, chosen, shown=shown)]


def _script_notes(script: "ScriptCall", chosen: Chosen, *, shown: str) -> Iterable[str]:
    """Yield a sentence on another script than that of the run, and one on other arguments."""
    if chosen.script not in (None, str(script.path)) and script.digest not in chosen.files.values():
        yield f"another script than that of the run {shown}: {chosen.script} there, {script.path} here"
    if chosen.arguments not in (None, digest_of_words(script.arguments)):
        yield f"the arguments of the script are not those of the run {shown}"


def _is_told(path: str) -> bool:
    return path in TOLD_TOO or not path.startswith(NOT_TOLD)


def note_on(loaded: "Loaded", weights: Path) -> str | None:
    """Return a sentence that says that the spec ``loaded`` is used, and how it differs from that of a checkpoint.

    Args:
        loaded: the spec that was given beside the weights.
        weights: a checkpoint or a run folder; None is returned for others and for damaged ones, which their reader names.

    Raises:
        UsageError: the checkpoint is one of another model.
    """
    found = best_of(weights) or weights
    try:
        trained: Mapping[str, Any] = read_description(found).get("spec") or {}
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
    changes = list_changes(loaded, before, now, matters=_matters)
    differences = changes or "they agree on model, data and evaluation"
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
