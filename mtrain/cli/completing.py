"""Shell completion of arguments: specs, paths of values in a spec, and the names that such a value may have."""

from pathlib import Path

import click
from click.shell_completion import CompletionItem

ENDINGS = (".yml", ".yaml")
NAMED = {
    "model.name": ("models",),
    "data.format": ("datasets",),
    "backend.name": ("backends",),
    "cluster.name": ("clusters",),
    "cluster.launcher": ("launchers", "clusters"),
    "launcher.name": ("launchers",),
}
"""Path in the spec -> kinds of plugins that it names."""


def complete_config(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete shipped specs and YAML files; where none matches, let the shell complete folders.

    Files are listed here because one item of click's type "file" makes bash drop all other items.
    """
    from mtrain.spec.sources import shipped_names

    names = [name for name in shipped_names() if name.startswith(incomplete)] + _files(incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def _files(incomplete: str) -> list[str]:
    """Return the YAML files that begin with ``incomplete``; hidden ones only where a part of the name is typed."""
    head = incomplete[: incomplete.rfind("/") + 1]
    folder, start = Path(head or ".").expanduser(), incomplete[len(head) :]
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(start))
    except OSError:
        return []
    return [head + name for name in names if name.endswith(ENDINGS) and (start or not name.startswith("."))]


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ``PATH=``, and after the ``=`` the values that are allowed there."""
    path, sign, start = incomplete.partition("=")
    if sign:
        return [CompletionItem(f"{path}={value}") for value in _values(path) if value.startswith(start)]
    return [CompletionItem(f"{item.value}=", help=item.help) for item in complete_path(ctx, param, incomplete)]


def _values(path: str) -> list[str]:
    """Return the values that a path of the spec may have, where they can be listed."""
    from mtrain.spec import plugins
    from mtrain.spec.model import Spec
    from mtrain.spec.schema import choices

    if path in NAMED:
        return [entry.name for kind in NAMED[path] for entry in plugins.names(kind) if entry.enabled]
    return choices(Spec, tuple(path.split(".")))


def complete_path(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete paths of values in a spec."""
    from mtrain.spec.model import Spec
    from mtrain.spec.schema import dotted, model_of, walk

    paths = [(dotted(path), field) for path, field in walk(Spec) if model_of(field.annotation) is None]
    return [CompletionItem(path, help=field.description) for path, field in paths if path.startswith(incomplete)]


def complete_launcher(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of launchers, and of clusters, which the flag takes too."""
    return _plugins("launchers", incomplete) + _plugins("clusters", incomplete)


def complete_cluster(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of clusters."""
    return _plugins("clusters", incomplete)


def complete_backend(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of backends."""
    return _plugins("backends", incomplete)


def complete_model(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of models."""
    return _plugins("models", incomplete)


def complete_importer(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of importers."""
    return _plugins("importers", incomplete)


def _plugins(kind: str, incomplete: str) -> list[CompletionItem]:
    from mtrain.spec import plugins

    entries = [entry for entry in plugins.names(kind) if entry.enabled]
    return [CompletionItem(entry.name, help=entry.summary) for entry in entries if entry.name.startswith(incomplete)]
