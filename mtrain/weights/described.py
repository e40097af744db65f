"""What a file of weights says of itself beside its arrays: its classes, and the model that they are of.

Pickled models of YOLOv5 hold ``names``; safetensors that mtrain wrote have an entry of their header. Both may come from
anybody, so what is not as expected is left out as if it were not there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.weights.pickles import Inert

KEY = "mtrain"
"""Entry of safetensors' ``__metadata__`` in which mtrain describes the file, as JSON text."""
MAX_CLASSES, MAX_CLASS_NAME = 100_000, 200
_HOLDERS = ("ema", "model")
"""Entries of a checkpoint that may hold the model, in the order in which their weights are preferred."""


class Description(BaseModel):
    """The entry ``KEY`` of safetensors."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    spec: Mapping[str, Any] = Field(default_factory=dict)
    """Sections ``model``, ``data`` and ``evaluate`` of the job; see ``spec.disclosure.needed_to_evaluate``."""

    def entries(self) -> dict[str, str]:
        """Return the content of ``__metadata__``."""
        return {KEY: json.dumps(self.model_dump(mode="json"), sort_keys=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What the description of safetensors says, as far as it can be used; see the fields of ``reading.Weights``."""

    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    pruned: Mapping[str, Sequence[int]] | None = None
    image_size: int | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


def said_by(header: Mapping[str, Any]) -> Said:
    """Read the description in the header of safetensors."""
    entries = header.get("__metadata__")
    text = entries.get(KEY) if isinstance(entries, Mapping) else None
    if not isinstance(text, str):
        return Said()
    try:
        found = Description.model_validate_json(text)
    except (ValidationError, RecursionError):
        return Said()
    model, data = _section(found.spec, "model"), _section(found.spec, "data")
    name, side = model.get("name"), data.get("image_size")
    names = class_names(found.class_names)
    ids = list(found.category_ids) if len(found.category_ids) == len(names) else []
    labels = {"class_names": names, "category_ids": ids} if names else {}
    if not isinstance(name, str) or not name.isprintable() or ":" in name or "/" in name:
        # The classes are harmless text, and are used even where the rest is not.
        return Said(labels=labels)  # a name with a colon would be code of a user
    pruned = model.get("pruned")
    return Said(
        model=name,
        options=_section(model, "options"),
        pruned=pruned if isinstance(pruned, Mapping) else None,
        image_size=side if isinstance(side, int) and side > 0 else None,
        labels=labels,
        spec=found.spec,
    )


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inside = values.get(key)
    return inside if isinstance(inside, Mapping) else {}


def class_names(value: object) -> list[str]:
    """Return the names of classes in label order: of a list, or of a dictionary by number; empty if it is neither."""
    if isinstance(value, Mapping):
        if set(value) != set(range(len(value))):
            return []
        value = [value[number] for number in range(len(value))]
    if not isinstance(value, list | tuple) or len(value) > MAX_CLASSES:
        return []
    if not all(isinstance(name, str) and name.isprintable() and len(name) <= MAX_CLASS_NAME for name in value):
        return []
    return list(value)


def pickled_labels(value: object) -> dict[str, Any]:
    """Return the classes in what ``torch.save`` wrote, as ``Weights.labels``: ``names`` of a model or of a checkpoint."""
    held = [value.get(key) for key in _HOLDERS] if isinstance(value, dict) else []
    for holder in [*held, value]:
        state = holder.state if isinstance(holder, Inert) else holder
        names = class_names(state.get("names")) if isinstance(state, Mapping) else []
        if names:
            return {"class_names": names}
    return {}
