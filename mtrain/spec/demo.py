"""The backend of the embedded demo, which trains wherever any backend can."""

from collections.abc import Mapping
from typing import Any

from mtrain.spec.provenance import Layers, Origin
from mtrain.spec.registry import Registry
from mtrain.spec.yaml_reader import Path

BACKEND: Path = ("backend", "name")
PYTHON: Path = ("backend", "python")
_OF_THE_USER = ("environment", "override", "flag")


def settle_backend(layers: Layers, registry: Registry, defaults: Mapping[str, Any]) -> list[str]:
    """Choose the first backend whose library is installed, if the user chose none and that of the demo's spec is not.

    Return a note on the choice, or nothing. Where no library is installed the spec's stays, and a later check refuses it
    with the command that installs its library.
    """
    if layers.is_set(PYTHON) or (layers.is_set(BACKEND) and layers.origins[BACKEND].kind in _OF_THE_USER):
        return []
    default = layers.get(BACKEND)
    entries = {entry.name: entry for entry in registry.usable("backends")}
    first = next((entry for entry in entries.values() if entry.installed), None)
    if first is None or default not in entries or entries[default].installed:
        return []
    reason = (
        f"the demo trains on {first.name}, because {entries[default].needs} is not installed, which {default} needs"
    )
    layers.assign(
        BACKEND, first.name, Origin("plugins", text=f"chosen for the demo: no {entries[default].needs} here"), defaults
    )
    return [reason]
