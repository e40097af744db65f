"""The kinds of plugins. This module imports nothing, so that the command line can list them before it reads a spec."""

from collections.abc import Mapping

SINGULAR: Mapping[str, str] = {
    "backends": "backend",
    "models": "model",
    "datasets": "data set",
    "tasks": "task",
    "launchers": "launcher",
    "clusters": "cluster",
    "importers": "importer",
}
"""Kind of plugin, which is the last part of its entry point group ``mtrain.<kind>``, and the word for one of it."""
KINDS = tuple(SINGULAR)
DECLARED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "backends": ("mtrain.core.interfaces.Backend", ("nn", "ops", "check")),
    "models": ("mtrain.core.interfaces.Model", ("kind", "published", "fused")),
    "datasets": ("mtrain.core.interfaces.Dataset", ("kind", "made_on_first_use")),
    "launchers": ("mtrain.core.interfaces.Launcher", ("plan", "deaths")),
    "clusters": ("mtrain.core.interfaces.Cluster", ("starts", "python", "command", "gathering")),
    "importers": ("mtrain.importers.importer.Importer", ("expected", "recognises", "translate")),
}
"""Kind of plugin -> the class that a plugin of it derives from, and the members that mtrain uses without instance."""
