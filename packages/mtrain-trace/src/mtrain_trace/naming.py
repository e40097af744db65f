"""What the recorders of all frameworks share: names of arrays, so that digests of the same array agree, and nested values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LABELS = ("labels", "label", "targets", "target")
"""Keyword arguments of models that hold the target of the loss."""


def common_front(names: list[str]) -> int:
    """Return the length of what all names begin with: a module that only holds the model, for its loss or its labels."""
    cut = 0
    while names and all("." in name[cut:] for name in names) and len({name[cut:].split(".")[0] for name in names}) == 1:
        # Digests and sketches depend on names, so a model and the same model inside such a holder need the same ones.
        cut += names[0][cut:].index(".") + 1
    return cut


def split_labels(keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the labels among the keyword arguments of a model, and the others."""
    labels = [value for key, value in keywords.items() if key in LABELS]
    return labels, {key: value for key, value in keywords.items() if key not in LABELS}


def tensors_in(values: Any, kind: type) -> Iterator[Any]:
    """Yield the tensors (of type ``kind``) in nested dictionaries, lists and tuples, in their order."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value, kind)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value, kind)
