"""The kinds of plugins, and the values of a spec that choose them.

This module imports nothing of mtrain, so that the command line can list kinds before it reads a spec.
"""

from collections.abc import Mapping
from typing import NamedTuple

SINGULAR: Mapping[str, str] = {
    "backends": "backend",
    "models": "model",
    "datasets": "data set",
    "tasks": "task",
    "launchers": "launcher",
    "clusters": "cluster",
    "allocations": "reader of allocations",
    "importers": "importer",
    "reporters": "reporter",
    "exported": "reader of exported models",
    "commands": "command",
    "meshes": "division of a model",
    "submissions": "way into queues",
}
"""Kind of plugin, which is the last part of its entry point group ``mtrain.<kind>``, and the word for one of it."""
KINDS = tuple(SINGULAR)
DECLARED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "backends": ("mtrain.core.interfaces.Backend", ("nn", "ops", "check", "before_script", "takes_meshes")),
    "models": ("mtrain.core.interfaces.Model", ("kind", "published", "fused", "native")),
    "datasets": ("mtrain.core.interfaces.Dataset", ("kind", "made_on_first_use")),
    "launchers": ("mtrain.core.interfaces.Launcher", ("plan", "deaths")),
    "clusters": (
        "mtrain.core.interfaces.Cluster",
        ("starts", "assigns", "submits", "python", "places", "command", "gathering", "queue"),
    ),
    "allocations": ("mtrain.core.interfaces.allocation.AllocationReader", ("distance", "read", "job_id")),
    "tasks": (
        "mtrain.tasks.base.TaskBase",
        (
            "sections",
            "divided",
            "prepared",
            "unreadable",
            "model_options",
            "images",
            "in_ranks",
            "own_code",
            "refuse",
        ),
    ),
    "importers": ("mtrain.spec.importers.importer.Importer", ("expected", "recognises", "translate")),
    "reporters": ("mtrain.core.interfaces.reporter.Reporter", ("every_rank", "fatal", "is_on", "start", "failure")),
    "exported": ("mtrain.core.interfaces.exported.ExportedFiles", ("spec_values", "evaluate", "predict")),
}
"""Kind of plugin -> the class that a plugin of it derives from, and the members that mtrain uses without instance."""


class Selector(NamedTuple):
    """A value of a spec that chooses a plugin, and the section with that plugin's options."""

    path: tuple[str, str]
    kind: str
    options: tuple[str, str]
    unset: str | None = None
    """Value that chooses no plugin, if there is one."""
    planned: bool = False
    """Whether the plan adds most of the options, and therefore validates them."""


SELECTORS = (
    Selector(("model", "name"), "models", ("model", "options")),
    Selector(("data", "format"), "datasets", ("data", "options")),
    Selector(("backend", "name"), "backends", ("backend", "options")),
    Selector(("cluster", "name"), "clusters", ("cluster", "options"), unset="auto"),
    Selector(("launcher", "name"), "launchers", ("launcher", "options"), unset="auto", planned=True),
)
REPORTERS = ("report", "reporters")
"""The key of a spec that names reporters, each with its options."""
