"""Write the skeleton of a distribution with one plugin: ``mtrain plugins new``."""

import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

from mtrain.errors import UsageError
from mtrain.spec.plugin_kinds import SINGULAR
from mtrain.spec.registry import Registry

FILES: Mapping[str, Mapping[str, str]] = {
    "backends": {"backends.py.txt": "backend.py", "backends_engine.py.txt": "engine.py"},
    "models": {"models.py.txt": "model.py", "models_network.py.txt": "network.py"},
    "datasets": {"datasets.py.txt": "dataset.py"},
    "tasks": {"tasks.py.txt": "task.py"},
    "launchers": {"launchers.py.txt": "launcher.py"},
}
"""Kind of plugin -> its templates, and the modules that are made of them; the first one has the plugin."""
KINDS: Mapping[str, str] = {SINGULAR[kind].replace(" ", ""): kind for kind in FILES}
"""Word on the command line -> kind of plugin."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def write(word: str, name: str, folder: Path | None) -> Path:
    """Write the distribution into ``folder``, ``mtrain-NAME`` if it is None, and return the folder.

    Raises:
        UsageError: the name cannot be one, is taken, or the folder exists or cannot be written.
    """
    kind = KINDS[word]
    _check(kind, name)
    distribution = f"mtrain-{name.replace('_', '-')}"
    folder = folder or Path(distribution)
    # A link that leads nowhere does not exist, and would be written through.
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder}: is there already, and nothing is overwritten; name another folder with --out")
    try:
        for path, text in _content(kind, name, distribution).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); name another folder with --out") from error
    return folder


def _check(kind: str, name: str) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"NAME: {name!r} given, expected a word of lower-case letters, digits and _ that begins with a letter, at most 40 long"
        )
    if taken := [entry for entry in Registry.read().names(kind) if entry.name == name]:
        raise UsageError(
            f"NAME: there is a {SINGULAR[kind]} {name!r} already, of {taken[0].provider.distribution}; choose another"
        )


def _content(kind: str, name: str, distribution: str) -> dict[str, str]:
    """Return the files of the distribution: path -> text."""
    package = f"mtrain_{name}"
    values = {
        "name": name,
        "kind": kind,
        "word": SINGULAR[kind],
        "distribution": distribution,
        "package": package,
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "points": _points(kind, name, package),
    }
    sources = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        "tests/test_plugin.py": "test_plugin.py.txt",
    } | {f"src/{package}/{module}": template for template, module in FILES[kind].items()}
    texts = {path: Template(_template(source)).substitute(values) for path, source in sources.items()}
    return texts | {f"src/{package}/__init__.py": f'"""The mtrain {SINGULAR[kind]} `{name}`."""\n'}


def _points(kind: str, name: str, package: str) -> str:
    """Return the entry points. A task brings a data set and a model, without which it cannot be tried."""
    module = f"{package}.{next(iter(FILES[kind].values())).removesuffix('.py')}"
    target = "".join(part.capitalize() for part in name.split("_"))
    points = {kind: {name: target}}
    if kind == "tasks":
        points |= {"datasets": {f"{name}_squares": f"Squares{target}"}, "models": {f"{name}_linear": f"Linear{target}"}}
    return "".join(
        f'[project.entry-points."mtrain.{group}"]\n'
        + "".join(f'{point} = "{module}:{found}"\n' for point, found in entries.items())
        + "\n"
        for group, entries in points.items()
    )


def _template(name: str) -> str:
    return (resources.files("mtrain_kit") / "templates" / name).read_text(encoding="utf-8")
