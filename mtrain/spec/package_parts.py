"""What the core loads from a package of mtrain's, through a group of entry points that the package fills."""

from typing import Any

from mtrain.errors import PluginError
from mtrain.spec import packages, plugins


def load(kind: str, name: str, key: str) -> Any:
    """Import and return what a package brings for the core.

    Args:
        kind: kind of plugin.
        name: its name.
        key: key of the spec that asks for it, for the words where the package is absent.

    Raises:
        PluginError: the package is not installed, or it cannot be imported.
    """
    require(kind, name, key)
    return plugins.load_object(kind, name)


def require(kind: str, name: str, key: str) -> None:
    """Refuse what a key of the spec asks for where the package is absent that brings it; see ``load``.

    Raises:
        PluginError: it is.
    """
    if not is_installed(kind, name):
        raise PluginError(packages.absent(packages.bringing(kind, name) or "", f"{key}: it needs what is"))


def is_installed(kind: str, name: str) -> bool:
    """Return whether something brings this plugin."""
    return any(entry.name == name for entry in plugins.names(kind))
