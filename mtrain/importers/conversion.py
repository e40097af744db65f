"""Convert files of another project to one checked spec: recognise them, translate them, and write the result."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from mtrain.errors import SpecError
from mtrain.importers import paddledetection, yolov5
from mtrain.importers.documents import Document, read
from mtrain.importers.key_report import Book, Entry, Given
from mtrain.spec import config
from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.schema import dotted, walk
from mtrain.spec.sources import display
from mtrain.spec.yaml_reader import flow

_EXPECTED = (
    "PaddleDetection's YAML with `architecture`, or YOLOv5's model (`backbone`), hyp (`lr0`) or data (`names`) YAML"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """A spec as text, and the fate of every key of the files from which it was made."""

    text: str
    files: Sequence[str]
    carried: Sequence[Entry]
    dropped: Sequence[Entry]
    assumed: Mapping[str, Given]
    """Values that no file states, by path in the spec."""
    notes: Sequence[str]


def convert(files: Sequence[FilePath], *, cards: int | None = None, overrides: Sequence[str] = ()) -> Imported:
    """Return the spec that files of another project describe.

    Args:
        files: one YAML of PaddleDetection, or up to three of YOLOv5, one of each kind.
        cards: number of cards for which PaddleDetection's batch per card is meant; None: eight.
        overrides: ``PATH=VALUE`` settings that override the result.

    Raises: ``SpecError`` if a file is damaged or unknown, describes a feature that mtrain does not have, or has values
    that a spec refuses: one line each, with file and line.
    """
    documents = [read(file) for file in files]
    books = _translate(documents, cards)
    values = {path: setting for book in books for path, setting in book.values.items()}
    loaded = _check(values, overrides)
    return Imported(
        text="\n".join(line for line, _ in _rendered(_overridden(values, loaded), documents)) + "\n",
        files=[file for document in documents for file in document.files],
        carried=[entry for book in books for entry in book.carried],
        dropped=[entry for book in books for entry in book.dropped],
        assumed={path: setting for path, setting in values.items() if not setting.stated},
        notes=list(dict.fromkeys(note for book in books for note in book.notes)),
    )


def _translate(documents: Sequence[Document], cards: int | None) -> Sequence[Book]:
    first = documents[0]
    foreign = [document for document in documents if paddledetection.is_one(document)]
    if foreign and len(documents) > 1:
        raise SpecError(f"{foreign[0].name}: import a config of PaddleDetection alone; it names its bases itself")
    if foreign:
        return [paddledetection.translate(first, cards=cards)]
    kinds: dict[str, Document] = {}
    for document in documents:
        kind = None if _sections(document) else yolov5.kind_of(document)
        if kind is None:
            raise SpecError(f"{document.name}: {_unknown(document)}; expected {_EXPECTED}")
        if kind in kinds:
            raise SpecError(f"{document.name}: {kinds[kind].name} is a {kind} YAML of YOLOv5 too; give one of them")
        kinds[kind] = document
    if cards is not None:
        raise SpecError(f"--cards {cards}: {first.name} is YOLOv5's, which states no batch per card; leave it out")
    return yolov5.translate({kind: kinds[kind] for kind in yolov5.KINDS if kind in kinds})


def _sections(document: Document) -> list[str]:
    """Return the names of the document's sections that belong to a spec of mtrain."""
    return [key for key in Spec.model_fields if isinstance(document.values.get(key), dict)]


def _unknown(document: Document) -> str:
    sections = _sections(document)
    if sections:
        return f"seems to be a spec of mtrain already (it has {', '.join(sections)})"
    return f"holds {', '.join(map(flow, list(document.values)[:5])) or 'nothing'}, which fits no known kind of config"


def _check(values: Mapping[str, Given], overrides: Sequence[str]) -> config.Loaded:
    """Load the spec as ``mtrain`` would; report a mistake at the place of the foreign value."""
    lines = list(_rendered(values, ()))
    with tempfile.TemporaryDirectory() as folder:
        file = FilePath(folder).resolve() / "imported.yml"
        file.write_text("\n".join(line for line, _ in lines) + "\n", encoding="utf-8")
        try:
            return config.load(str(file), overrides=overrides, environ={})
        except SpecError as error:
            raise SpecError(
                [_located(problem, f"{display(file)}:", lines, values) for problem in error.problems]
            ) from None


def _located(problem: str, prefix: str, lines: Sequence[tuple[str, str]], values: Mapping[str, Given]) -> str:
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
        for nested_path in [other_path for other_path in result if other_path.startswith(f"{path}.")]:
            del result[nested_path]
        result[path] = Given(value, origin.text)
    return result


def _rendered(values: Mapping[str, Given], documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the path of the value on it; lines of sections and comments have no path.

    Sections and values are in the order of the schema, options in the order in which they were entered.
    """
    for document in documents:
        yield _comment(f"imported from {document.name}"), ""
    order = {dotted(path): place for place, (path, _) in enumerate(walk(Spec))}
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
    return "# " + "".join(character if character.isprintable() else "?" for character in text)
