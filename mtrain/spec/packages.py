"""The packages that belong to mtrain and are installed apart: which verbs and plugins each brings, and that all have one version.

The core imports none of them; they are found through entry points, as anybody's are. This table is for the words about one that is not
installed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtrain.errors import PluginError

POLICY_FILE = "plugins.toml"
"""What a package, and a user, says of plugins."""


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
            "allocations": ("slurm", "lsf", "pbs", "pmi", "jsrun", "kubeflow", "sagemaker", "indexed_job"),
            "submissions": ("queues",),
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


def find_policy_file(module: str, search_path: Sequence[str]) -> Path:
    """Return where the ``plugins.toml`` of a package is or would be; the package is not imported."""
    for entry in search_path:
        # The usual case without ``find_spec``, which would run the hooks of editable installations for each package.
        if os.path.exists(os.path.join(entry, module, "__init__.py")):
            return Path(entry, module, POLICY_FILE)
    from importlib.util import find_spec  # it may be found by a hook, or have no file of its own

    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    return Path(folder or "/nonexistent") / POLICY_FILE


def bringing(kind: str, name: str) -> str | None:
    """Return the package that brings a plugin; None: none of these."""
    return next((package for package, each in PACKAGES.items() if name in each.brings.get(kind, ())), None)


def absent(package: str, what: str) -> str:
    """Return the words for something of a package that is not installed, with the command that installs it."""
    from mtrain.spec import remedies

    return f"{what} of {package}, which is not installed: {remedies.install(package)}"


def installed_version(package: str) -> str | None:
    """Return the version of a package as its source says; None: it is not installed.

    Raises:
        PluginError: it is installed, and cannot be imported.
    """
    from importlib import import_module, metadata

    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    try:
        return str(getattr(import_module(package.replace("-", "_")), "__version__", "unknown"))
    except Exception as error:  # Half of it may be there, or another release's.
        words = f"{package} cannot be imported: {type(error).__name__}: {error}"
        raise PluginError(f"{words}; install it anew: {_install_anew(package)}") from error


def other_version(package: str, version: str) -> str | None:
    """Return what is wrong with a version of a package, and the remedy; None: mtrain has it too."""
    from mtrain import __version__

    if version == __version__:
        return None
    words = f"{package} has version {version}, mtrain {__version__}; they are released together"
    return f"{words}, install both from one place: {_install_anew(package)}"


def _install_anew(package: str) -> str:
    from mtrain.spec import remedies

    return remedies.install(package, anew=True)


def check_version(target: str) -> None:
    """Refuse to import something from a package that has another version than mtrain.

    Args:
        target: of an entry point. Nothing but its package is imported, since the rest of another version may not fit.

    Raises:
        PluginError: the package has another version than mtrain, or it cannot be imported.
    """
    module = module_of(target)
    if module in MODULES:
        package = module.replace("_", "-")
        version = installed_version(package)
        if version is not None and (problem := other_version(package, version)):
            raise PluginError(problem)
