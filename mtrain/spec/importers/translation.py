"""Translate files of another project to values of a spec: recognise them, translate them, and write the result as text."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.importers import kinds
from mtrain.spec.importers.documents import Document, read_far
from mtrain.spec.importers.importer import Importer, refuse_file
from mtrain.spec.importers.key_report import Book, Given, ReportedKey, show_value
from mtrain.spec.importers.launching import Accelerate, DeepSpeed
from mtrain.spec.model import Spec
from mtrain.spec.registry import Registry
from mtrain.spec.schema import dot, walk
from mtrain.spec.sources import Files, nest
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

    def lines(self) -> list[str]:
        """Return lines that say what became of every key of the imported files."""
        assumed = [f"{path}: {show_value(value.value)} - {value.source}" for path, value in self.assumed.items()]
        parts = (
            ("carried over", [f"{entry} -> {entry.remark}" for entry in self.carried]),
            ("assumed, as no file states it", assumed),
            ("not carried over", [f"{entry} - {entry.remark}" for entry in self.dropped]),
            ("notes", self.notes),
        )
        lines = [f"read: {', '.join(self.files)}"]
        for title, entries in parts:
            lines += [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries)]
        return [one_line(line) for line in lines]

    def summary(self) -> list[str]:
        """Return lines for a job's start: how many keys have which fate, and what of the files is not as it was there."""
        counts = (
            f"{len(self.carried)} keys carried over, {len(self.assumed)} assumed, {len(self.dropped)} not carried over"
        )
        keys: dict[str, list[str]] = {}
        for entry in self.dropped:
            keys.setdefault(entry.remark, []).append(entry.key)
        dropped = [f"not carried over: {', '.join(names)} - {reason}" for reason, names in keys.items()]
        file = self.files[0]
        lines = [
            f"imported from {file}: {counts}; each: mtrain config import {shlex.quote(file)}",
            *dropped,
            *self.notes,
        ]
        return [one_line(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Taken:
    """A file of another project that was given as a spec: its values as a layer, and what became of its keys."""

    files: Files
    overrides: Sequence[str]
    """Those of ``-o`` that name keys of a spec; the others have changed keys of the file."""
    imported: Imported


def take(file: FilePath, overrides: Sequence[str], *, is_script: bool) -> Taken | None:
    """Import a file that was given in the place of a spec; None if it seems to be a spec.

    ``is_script``: whether the job runs a script, for which a file counts that says where it runs.

    Raises: ``SpecError`` for a file of another project that no importer turns into a training, with what to do instead.
    """
    kinds.check_name(file)
    document, problems = read_far(file)
    importer = next((each for each in _make_shipped(Registry.read()) if each.recognises([document])), None)
    if importer is None:
        kinds.check_keys(document)
        return None  # whoever reads it as a spec tells the mistakes
    if problems:
        raise SpecError(problems)
    lacking = "" if is_script and importer.of_scripts else importer.lacking(document)
    if lacking:
        raise SpecError(f"{document.name}: is {lacking}")
    own = document.override(overrides)
    books = importer.translate([document], cards=None)
    values = collect_values(books)
    return Taken(layer_of(values, [document]), own, report([document], books, values, schema=Spec))


def collect_values(books: Sequence[Book]) -> dict[str, Given]:
    """Return the values of all books, by path in the spec."""
    values: dict[str, Given] = {}
    for book in books:
        # What one file states is not undone by what another leaves out.
        values |= {path: new for path, new in book.values.items() if new.stated or path not in values}
    return values


def layer_of(values: Mapping[str, Given], documents: Sequence[Document]) -> Files:
    """Return translated values as files of a spec, each value with its place in the documents."""
    return Files.of_import({path: (given.value, given.source) for path, given in values.items()}, documents[0].name)


def report(
    documents: Sequence[Document], books: Sequence[Book], values: Mapping[str, Given], *, schema: type[Spec]
) -> Imported:
    """Return ``values`` as the text of a spec, and what became of every key of the documents."""
    return Imported(
        text="\n".join(_render(values, documents, schema=schema)) + "\n",
        files=[file for document in documents for file in document.files],
        carried=[entry for book in books for entry in book.carried],
        dropped=[entry for book in books for entry in book.dropped],
        assumed={path: setting for path, setting in collect_values(books).items() if not setting.stated},
        notes=list(dict.fromkeys(note for book in books for note in book.notes)),
    )


def choose_importer(name: str | None, documents: Sequence[Document]) -> Importer:
    """Return the named importer, or the first of mtrain's own that recognises the files.

    Raises: ``SpecError`` where none does, ``PluginError`` for an unknown name.
    """
    registry = Registry.read()
    if name is not None:
        return _make_importer(name, registry)
    shipped = _make_shipped(registry)
    chosen = next((importer for importer in shipped if importer.recognises(documents)), None)
    if chosen is None:
        kinds.check_keys(documents[0])
        others = [entry.name for entry in registry.usable("importers") if not entry.is_own]
        expected = [importer.expected for importer in shipped]
        expected += [f"files of another project with --from {' or '.join(others)}"] if others else []
        raise refuse_file(documents[0], ", or ".join(expected))
    return chosen


def _make_shipped(registry: Registry) -> list[Importer]:
    """Return mtrain's own importers: the plugins, and those of files that say where scripts run."""
    plugins = [_make_importer(entry.name, registry) for entry in registry.usable("importers") if entry.is_own]
    return [*plugins, Accelerate(), DeepSpeed()]


def _make_importer(name: str, registry: Registry) -> Importer:
    importer: Importer = registry.make("importers", name, {}, path=f"importer {name}")
    return importer


def _render(values: Mapping[str, Given], documents: Sequence[Document], *, schema: type[Spec]) -> Iterator[str]:
    """Yield lines of YAML, each value with its origin in a comment.

    Sections and values are in the order of the schema, options in the order in which they were entered.
    """
    for document in documents:
        yield _comment(f"imported from {document.name}")
    order = {dot(path): place for place, (path, _) in enumerate(walk(schema))}
    ranked = sorted(values, key=lambda path: order.get(path, order.get(".".join(path.split(".")[:2]), len(order))))
    yield from _section(nest({path: values[path] for path in ranked}), "")


def _section(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{flow(key)}:"
            yield from _section(value, f"{indent}  ")
        elif isinstance(value.value, list) and any(isinstance(item, dict) for item in value.value):
            yield f"{indent}{flow(key)}:  {_comment(value.source)}"
            for item in value.value:
                yield f"{indent}  - {flow(item)}"
        else:
            yield f"{indent}{flow(key)}: {flow(value.value)}  {_comment(value.source)}"


def _comment(text: str) -> str:
    return "# " + one_line(text)
