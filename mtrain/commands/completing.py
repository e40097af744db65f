"""Shell completion of arguments: specs, paths of values in a spec, and the names that such a value may have."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

ENDINGS = (".yml", ".yaml")


def complete_config(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete shipped specs and YAML files; where none matches, let the shell complete folders."""
    # Files are listed here because one item of click's type "file" makes bash drop all other items.
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
    from mtrain.spec.plugin_kinds import SELECTORS
    from mtrain.spec.registry import Registry
    from mtrain.spec.schema import choices

    kinds = [selector.kind for selector in SELECTORS if ".".join(selector.path) == path]
    if kinds:
        return [entry.name for kind in kinds for entry in Registry.read().usable(kind)]
    keys = tuple(path.split("."))
    return list(dict.fromkeys(word for schema in _schemas() for word in choices(schema, keys)))


def complete_path(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete paths of values in a spec, those of every installed task included."""
    from mtrain.spec.schema import dot, model_of, walk

    fields = {
        dot(path): field for schema in _schemas() for path, field in walk(schema) if model_of(field.annotation) is None
    }
    return [
        CompletionItem(path, help=field.description) for path, field in fields.items() if path.startswith(incomplete)
    ]


def _schemas() -> "list[type[Spec]]":
    """Return the core's schema of a spec and that of each installed task."""
    from mtrain.spec.building import Tasks
    from mtrain.spec.model import Spec

    return [Spec, *Tasks().schemas.values()]


def complete_plugin(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a function that completes names of plugins of a kind."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mtrain.spec.registry import Registry

        entries = Registry.read().usable(kind)
        return [
            CompletionItem(entry.name, help=entry.summary) for entry in entries if entry.name.startswith(incomplete)
        ]

    return complete
