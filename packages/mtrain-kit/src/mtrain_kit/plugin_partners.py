"""The other half of the jobs in which a plugin is tested: a data set and a model of its task, and a backend."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mtrain.core.interfaces import Launcher
from mtrain.core.plugin_classes import with_defaults
from mtrain.errors import PluginError
from mtrain.spec import plugins
from mtrain.spec.plugin_kinds import SINGULAR
from mtrain.spec.registry import Registry

PARTNERS: Mapping[str, Mapping[str, Any]] = {
    "classification": {
        "data.format": "digits_classes",
        "data.image_size": 8,
        "model.name": "vit",
        "model.options.patch": 2,
    },
    "detection": {"data.format": "digits", "data.image_size": 64, "model.name": "yolov5n"},
    "segmentation": {
        "data.format": "digits_masks",
        "data.options.train": 16,
        "data.options.val": 8,
        "data.image_size": 64,
        "model.name": "unet",
        "model.options.width": 8,
        "model.options.depth": 3,
    },
}
"""Task -> a data set and a model of mtrain with which a plugin of that task is tested, unless others are named."""
# As the loss of YOLOv5 is published: it depends on the number of ranks.
PER_RANK = ("detection",)
"""Tasks with losses that are a mean over the boxes of each rank."""
BACKENDS = {"torch": "ddp", "none": "solo", "paddle": "fleet", "horovod": "horovod"}
"""Rendezvous -> the backend whose ranks a launcher of that rendezvous starts."""
# A task is chosen by its data set and its model.
CHOSEN_BY = {"models": "model.name", "datasets": "data.format", "launchers": "launcher.name"}
"""Kind of plugin -> the key of a spec that chooses one."""


def partners(kind: str, name: str, *, registry: Registry, overridden: set[str]) -> dict[str, Any]:
    """Return values of a spec that choose the plugin, and a data set and a model with which to test it.

    ``overridden``: paths of the spec that the caller sets. For a task of its own, the data set and the model are those
    that come in the same distribution as the plugin.

    Raises:
        PluginError: the plugin is unknown, or nothing in its distribution makes a job of it.
    """
    if kind == "launchers":
        registry.find("launchers", name)
        return {**PARTNERS["classification"], "launcher.name": name}
    own = CHOSEN_BY.get(kind)
    task = name if own is None else registry.task_of(kind, name)
    registry.find("tasks", task)
    known = PARTNERS.get(task, {})
    if own is None:
        chosen = dict(known)
    else:
        section = own.partition(".")[0]
        chosen = {path: value for path, value in known.items() if not path.startswith(f"{section}.")} | {own: name}
        if section == "data" and known:
            chosen["data.image_size"] = known["data.image_size"]
    # Options of a partner do not suit another one that the caller names.
    replaced = {path.partition(".")[0] for path in ("model.name", "data.format") if path in overridden}
    chosen = {path: value for path, value in chosen.items() if not _is_option_of(path, replaced)}
    for path, other in (("model.name", "models"), ("data.format", "datasets")):
        if path not in chosen and path not in overridden:
            chosen[path] = _fellow(other, task, of=(kind, name), registry=registry)
    return chosen


def _is_option_of(path: str, sections: set[str]) -> bool:
    return any(path.startswith(f"{section}.options.") for section in sections)


def _fellow(kind: str, task: str, *, of: tuple[str, str], registry: Registry) -> str:
    """Return a plugin of this task that comes in the same distribution as the tested one, a data set that needs no files
    first."""
    tested_kind, tested = of
    own = registry.find(tested_kind, tested).provider.distribution
    entries = [] if own == plugins.POLICY_FILE else registry.names(kind)
    names = [entry.name for entry in entries if entry.provider.distribution == own]
    names = [name for name in names if registry.task_of(kind, name) == task]
    if not names:
        raise PluginError(
            f"the {SINGULAR[tested_kind]} {tested!r} is of the task {task!r}; say with which {SINGULAR[kind]} to test "
            f"it: -o {'model.name' if kind == 'models' else 'data.format'}=NAME"
        )
    return min(names, key=lambda name: not getattr(registry.load(kind, name), "made_on_first_use", False))


def backends_of(launcher: str, *, registry: Registry) -> list[str]:
    """Return a backend for each rendezvous that a launcher provides, those whose library is installed here first.

    Raises:
        PluginError: it provides none.
    """
    provides = with_defaults(registry.load("launchers", launcher), Launcher).provides
    names = [name for rendezvous, name in BACKENDS.items() if rendezvous in provides]
    if not names:
        raise PluginError(f"the launcher {launcher!r} provides none of {', '.join(BACKENDS)}; set its `provides`")
    installed = [name for name in names if registry.find("backends", name).is_installed]
    return installed or names[:1]


def frameworks() -> list[str]:
    """Return the frameworks of `solo` that are installed here; torch where there is none, so that the job says so."""
    return [name for name in ("torch", "paddle") if find_spec(name) is not None] or ["torch"]
