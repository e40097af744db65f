"""The packages that belong to mtrain and are installed apart: which verbs and plugins each brings, and that all have one version.

The core imports none of them; they are found through entry points, as anybody's are. This table is for the words about one that is not
installed.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from mtrain.errors import PluginError


class Package(NamedTuple):
    """A distribution of mtrain's clone."""

    heading: str = ""
    """Heading of its verbs in the help."""
    brings: Mapping[str, tuple[str, ...]] = {}
    """Kind of plugin -> names."""


PACKAGES: Mapping[str, Package] = {
    "mtrain-clusters": Package(
        "Scheduler",
        {
            "commands": ("submit", "status", "logs", "cancel"),
            "clusters": ("slurm", "kubernetes", "ray"),
            "allocations": ("slurm", "lsf", "pbs", "pmi", "kubeflow", "sagemaker", "indexed_job"),
            "reporters": ("kubeflow",),
        },
    ),
    "mtrain-deploy": Package("Ship", {"commands": ("export", "quantise", "prune", "serve"), "exported": ("onnx",)}),
    "mtrain-kit": Package("Inspect", {"commands": ("plugins.new", "plugins.test")}),
    "mtrain-language": Package(
        "",
        {"tasks": ("language",), "models": ("hf",), "datasets": ("text", "python_docs"), "meshes": ("layers", "plan")},
    ),
    "mtrain-sweep": Package("Train", {"commands": ("sweep",)}),
    "mtrain-tensorflow": Package(),
    "mtrain-ui": Package(
        "Results", {"commands": ("report", "ui"), "reporters": ("html", "mlflow", "visualdl", "wandb")}
    ),
}
"""Distribution -> what it brings. Its module has the same name, with an underscore."""
MODULES = frozenset(name.replace("-", "_") for name in PACKAGES)


def module_of(target: str) -> str:
    """Return the package that an entry point's target names first."""
    return target.partition(":")[0].partition(".")[0]


def is_own(target: str) -> bool:
    """Return whether an entry point's target lies in mtrain or in one of its packages."""
    module = module_of(target)
    return module == "mtrain" or module in MODULES


def bringing(kind: str, name: str) -> str | None:
    """Return the package that brings a plugin; None: none of these."""
    return next((package for package, each in PACKAGES.items() if name in each.brings.get(kind, ())), None)


def absent(package: str, what: str) -> str:
    """Return the words for something of a package that is not installed, with the command that installs it."""
    from mtrain.spec import remedies

    return f"{what} of {package}, which is not installed: {remedies.install(package)}"


def load(kind: str, name: str, key: str) -> Any:
    """Import and return what a package brings for the core.

    Args:
        kind: kind of plugin.
        name: its name.
        key: key of the spec that asks for it, for the words where the package is absent.

    Raises:
        PluginError: the package is not installed, or it cannot be imported.
    """
    from mtrain.spec import plugins

    if not is_installed(kind, name):
        raise PluginError(absent(bringing(kind, name) or "", f"{key}: it needs what is"))
    return plugins.load_object(kind, name)


def is_installed(kind: str, name: str) -> bool:
    """Return whether something brings this plugin."""
    from mtrain.spec import plugins

    return any(entry.name == name for entry in plugins.names(kind))


def check_version(target: str) -> None:
    """Refuse what has been imported from a package of another version.

    Raises:
        PluginError: the package has another version than mtrain.
    """
    module = module_of(target)
    if module not in MODULES:
        return
    from mtrain import __version__
    from mtrain.spec import remedies

    found = getattr(sys.modules.get(module), "__version__", None)
    if found != __version__:
        package = module.replace("_", "-")
        raise PluginError(
            f"{package} has version {found}, mtrain {__version__}; they are released together, install both from one place: "
            f"{remedies.install(package)}"
        )
