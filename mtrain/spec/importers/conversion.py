"""Convert files of another project to one checked spec: recognise them, translate them, and write the result."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec import config
from mtrain.spec.importers.documents import Document, read
from mtrain.spec.importers.importer import Importer, refuse_file
from mtrain.spec.importers.key_report import Given, ReportedKey
from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.registry import Registry
from mtrain.spec.schema import dot, walk
from mtrain.spec.sources import display
from mtrain.spec.terminal import one_line
from mtrain.spec.yaml_reader import flow


@dataclass(frozen=True, slots=True)
class Imported:
    """A spec as text, and the fate of every key of the files from which it was made."""

    text: str
    files: Sequence[str]
    carried: Sequence[ReportedKey]
    dropped: Sequence[ReportedKey]
    assumed: Mapping[str, Given]
    """Values that no file states, by path in the spec."""
    notes: Sequence[str]


def convert(
    files: Sequence[FilePath],
    *,
    importer: str | None = None,
    cards: int | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Return the spec that files of another project describe.

    Args:
        files: one or more files of that project, for example up to three YAMLs of YOLOv5, one of each kind.
        importer: name of the importer plugin; None: the first of mtrain's own that recognises the files.
        cards: number of devices for which a batch per device is meant; None: as the importer assumes.
        overrides: ``PATH=VALUE`` settings that override the result.

    Raises: ``SpecError`` if a file is damaged or unknown, describes a feature that mtrain does not have, or has values
    that a spec refuses: one line each, with file and line.
    """
    documents = [read(file) for file in files]
    books = _importer(importer, documents).translate(documents, cards=cards)
    values = {path: setting for book in books for path, setting in book.values.items()}
    loaded = _check(values, overrides)
    lines = _render(_overridden(values, loaded), documents, schema=type(loaded.spec))
    return Imported(
        text="\n".join(line for line, _ in lines) + "\n",
        files=[file for document in documents for file in document.files],
        carried=[entry for book in books for entry in book.carried],
        dropped=[entry for book in books for entry in book.dropped],
        assumed={path: setting for path, setting in values.items() if not setting.stated},
        notes=list(dict.fromkeys(note for book in books for note in book.notes)),
    )


def _importer(name: str | None, documents: Sequence[Document]) -> Importer:
    """Return the named importer, or the first of mtrain's own that recognises the files.

    Raises: ``SpecError`` where none does, ``PluginError`` for an unknown name.
    """
    registry = Registry.read()
    if name is not None:
        return _make_importer(name, registry)
    entries = registry.usable("importers")
    shipped = [_make_importer(entry.name, registry) for entry in entries if entry.is_own]
    chosen = next((importer for importer in shipped if importer.recognises(documents)), None)
    if chosen is None:
        others = [entry.name for entry in entries if not entry.is_own]
        expected = [importer.expected for importer in shipped]
        expected += [f"files of another project with --from {' or '.join(others)}"] if others else []
        raise refuse_file(documents[0], ", or ".join(expected))
    return chosen


def _make_importer(name: str, registry: Registry) -> Importer:
    importer: Importer = registry.make("importers", name, {}, path=f"importer {name}")
    return importer


def _check(values: Mapping[str, Given], overrides: Sequence[str]) -> config.Loaded:
    """Load the spec as ``mtrain`` would; report a mistake at the place of the foreign value."""
    lines = list(_render(values, (), schema=Spec))
    # A file, so that the result is read as a user's spec would be,
    # and each mistake has a line, which leads to the foreign value.
    with tempfile.TemporaryDirectory() as folder:
        file = FilePath(folder).resolve() / "imported.yml"
        file.write_text("\n".join(line for line, _ in lines) + "\n", encoding="utf-8")
        try:
            return config.load(str(file), overrides=overrides, environ={})
        except SpecError as error:
            raise SpecError(
                [_locate(problem, f"{display(file)}:", lines, values) for problem in error.problems]
            ) from None


def _locate(problem: str, prefix: str, lines: Sequence[tuple[str, str]], values: Mapping[str, Given]) -> str:
    if not problem.startswith(prefix):
        return problem
    number, _, message = problem.removeprefix(prefix).partition(" ")
    path = lines[int(number) - 1][1] if number.isdigit() else ""
    return f"{values[path].source}: {message}" if path else f"in the spec that results: {message}"


def _overridden(values: Mapping[str, Given], loaded: config.Loaded) -> dict[str, Given]:
    """Return ``values`` with the overrides of ``-o``, which change or add values or replace a whole section."""
    result = dict(values)
    for path, origin in loaded.provenance.items():
        keys = path.split(".")
        value = lookup(loaded.values, tuple(keys))
        if origin.kind != "override" or (isinstance(value, dict) and value):
            continue
        enclosing = next((other_path for other_path in result if path.startswith(f"{other_path}.")), None)
        if enclosing is not None:
            path, value = enclosing, lookup(loaded.values, tuple(enclosing.split(".")))
        # A section that was set as a whole replaces the values in it.
        for nested_path in [other_path for other_path in result if other_path.startswith(f"{path}.")]:
            del result[nested_path]
        result[path] = Given(value, origin.text)
    return result


def _render(
    values: Mapping[str, Given], documents: Sequence[Document], *, schema: type[Spec]
) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the path of the value on it; lines of sections and comments have no path.

    Sections and values are in the order of the schema, options in the order in which they were entered.
    """
    for document in documents:
        yield _comment(f"imported from {document.name}"), ""
    order = {dot(path): place for place, (path, _) in enumerate(walk(schema))}
    ranked = sorted(values, key=lambda path: order.get(path, order.get(".".join(path.split(".")[:2]), len(order))))
    tree: dict[str, Any] = {}
    for path in ranked:
        *sections, last = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = values[path]
    yield from _section(tree, "", "")


def _section(tree: Mapping[str, Any], prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield f"{indent}{flow(key)}:", ""
            yield from _section(value, f"{path}.", f"{indent}  ")
        elif isinstance(value.value, list) and any(isinstance(item, dict) for item in value.value):
            yield f"{indent}{flow(key)}:  {_comment(value.source)}", path
            for item in value.value:
                yield f"{indent}  - {flow(item)}", path
        else:
            yield f"{indent}{flow(key)}: {flow(value.value)}  {_comment(value.source)}", path


def _comment(text: str) -> str:
    return "# " + one_line(text)
