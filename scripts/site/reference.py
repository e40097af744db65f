"""The page of the Python interface, which mkdocstrings fills from the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PARTS = {
    "mtrain.rank.script.session": (
        "Session",
        "What a script of your own calls; [your own training script](your-own-script.md) shows how.",
    ),
    "mtrain.rank.script.rules": ("Optimizers and schedules of your own scripts", ""),
    "mtrain.commands.functions": (
        "Functions",
        "[mtrain from Python](python.md) shows how they are used. A `spec` is a YAML file, the name of a shipped config, a dict "
        "with the keys of a YAML file, or a `mtrain.Spec`.",
    ),
    "mtrain.commands.results": ("Results", "What these functions return."),
    "mtrain_clusters.commands.submit": ("Submitted jobs", "Jobs in the queue of a scheduler."),
    "mtrain_clusters.queued_job": ("A submitted job", "What these functions return."),
    "mtrain.spec.typed": ("A spec as types", "Its keys are those of [a spec](spec.md)."),
}
"""Module that defines public names -> heading and first line of its part of the page; others come after these."""
MODULES = {
    "mtrain.errors": (
        "Errors",
        "All are `mtrain.errors.MtrainError`; `exit_code` is the code with which `mtrain` ends.",
    ),
    "mtrain.core.interfaces": (
        "Interfaces of plugins",
        "[Contributing](CONTRIBUTING.md) says which plugin implements which interface.",
    ),
    "mtrain.core.interfaces.queue": (
        "The queue of a scheduler",
        "What a cluster plugin implements for `mtrain submit`.",
    ),
    "mtrain.core.update.recipe": ("Recipes and parameter groups", ""),
}
"""Modules that are shown as a whole."""


def page(package: Path, contributing: str) -> str:
    """Return the Markdown of the page. `contributing` is the place of CONTRIBUTING.md on the site."""
    lines = ["# Python reference", "", "Generated from the code.", ""]
    roots = [package, *sorted(init.parent for init in package.parent.glob("packages/*/src/mtrain_[!t]*/__init__.py"))]
    found = [(module, shown, root) for root in roots for module, shown in _public(root / "__init__.py")]
    names = {module: shown for module, shown, _ in found}
    more = {module: (_heading(root, module), "") for module, _, root in found if module not in PARTS}
    for module, (heading, text) in {**PARTS, **more}.items():
        lines += [f"## {heading}", "", text, ""]
        for name in names[module]:
            lines += [f"::: {module}.{name}", ""]
    for module, (heading, text) in MODULES.items():
        options = ["    options:", "      show_root_heading: false", "      show_root_toc_entry: false"]
        lines += [f"## {heading}", "", text.replace("CONTRIBUTING.md", contributing), ""]
        init = package.parent.joinpath(*module.split("."), "__init__.py")
        for shown in [part for part, _ in _public(init)] if init.exists() else [module]:
            lines += [f"::: {shown}", *options, ""]
    return "\n".join(lines)


def _heading(package: Path, module: str) -> str:
    """Return a heading for a module that has none in `PARTS`: the beginning of its docstring, up to a colon or full stop."""
    place = package.parent.joinpath(*module.split("."))
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or module
    return re.split(r"[:.]", text, maxsplit=1)[0]


def _public(init: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each module from which the package takes public names, with these names."""
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            (f"{init.parent.name}.", "mtrain.core.")
        ):
            yield node.module or "", [name.name for name in node.names]
