"""Plugin classes that are not derived from their Protocol, completed with its defaults."""

from typing import Any


def with_defaults(plugin: type[Any], protocol: type[Any]) -> type[Any]:
    """Return the plugin class with the default members of ``protocol``, where it has none of its own.

    A class that is derived from the Protocol is returned as it is. For any other class, a derived one is returned.
    Launchers need this: theirs was no class to derive from when ``automatic`` was an optional attribute.
    """
    if protocol in plugin.__mro__:
        return plugin
    names = {name: getattr(plugin, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plugin.__name__, (plugin, protocol), names)
