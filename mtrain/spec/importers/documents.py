"""Read YAML files of other projects, merged over their ``_BASE_`` files, as plain values with file and line.

Reading is safe: tags construct no objects, aliases and nesting are limited (``spec.yaml_reader``), and only regular
files of bounded size are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.sources import BASE_KEY, display, nest
from mtrain.spec.yaml_reader import Parsed, Path, nearest, parse, parse_value, read_text

MAX_FILES = 100
"""Largest number of files read for one document: the file, its bases, and their bases."""
TAG_KEY = "name"
"""Key under which the word of a tag is stored: ``!CosineDecay {max_epochs: 360}`` equals ``{name: CosineDecay,
...}``."""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """File and line of a value."""

    file: str
    line: int | None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class Document:
    """The values of a file merged over those of its bases: mappings merge, everything else replaces."""

    name: str
    """Name of the file in messages."""
    path: FilePath
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, FilePlace] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """Names of all files read, each before its bases."""
    whole: set[Path] = field(default_factory=set)
    """Paths of the mappings with a tag: they replace, and are replaced, as a whole."""

    def get(self, path: Path) -> Any:
        """Return the value at ``path``; None if there is none."""
        return lookup(self.values, path)

    def has(self, path: Path) -> bool:
        """Return whether ``path`` has a value; null counts as one."""
        return path in self.places

    def place(self, path: Path) -> FilePlace:
        """Return the place of the value at ``path``, or of the nearest value around it."""
        return nearest(path, self.places) or FilePlace(self.name, None)

    def override(self, settings: Sequence[str]) -> list[str]:
        """Set values of the document's own keys by ``PATH=VALUE``, and return the settings of other keys."""
        others = []
        for setting in settings:
            dotted, sign, text = setting.partition("=")
            path = dotted.strip()
            section = path.partition(".")[0]
            if not sign or section not in self.values or section in Spec.model_fields:
                others.append(setting)
                continue
            try:
                value = parse_value(text)
            except ValueError as error:
                raise SpecError(f"-o {setting}: {error}") from None
            _merge(self, self.values, nest({path: value}), (), _Layer(Parsed(), f"-o {setting}", set()))
        return others

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Yield the path of every value at or below ``path`` that has no keys of its own, in the order of the document.

        A list of plain values counts as one value.
        """
        if not path or self.has(path):
            yield from _leaves(self.get(path), path)


def read(file: FilePath) -> Document:
    """Read a file and its bases, which are named relative to it.

    Raises: ``SpecError`` with every mistake of every file, one line each.
    """
    document, problems = read_far(file)
    if problems:
        raise SpecError(problems)
    return document


def read_far(file: FilePath) -> tuple[Document, list[str]]:
    """Read a file and its bases as far as they can be read, and return a line for each mistake."""
    resolved = _resolve(file)
    if resolved is None:
        return Document(str(file), file), [f"{file}: no such file; expected a YAML file"]
    document = Document(name=display(resolved), path=resolved)
    problems: list[str] = []
    _add(document, resolved, (), problems)
    return document, list(dict.fromkeys(problems))


def _add(document: Document, file: FilePath, chain: tuple[FilePath, ...], problems: list[str]) -> None:
    name = display(file)
    # Only a file above itself is a circle: two branches may share a base.
    if file in chain:
        names = " -> ".join(display(link) for link in (*chain[chain.index(file) :], file))
        problems.append(f"{name}: {BASE_KEY} goes round in a circle: {names}")
        return
    if len(document.files) >= MAX_FILES:
        problems.append(f"{name}: not read: {document.name} and its bases are more than {MAX_FILES} files")
        return
    document.files.append(name)
    text, problem = _text(file, name)
    parsed = parse(text, name=name, local_tags=True)
    problems.extend([problem] if problem else parsed.problems)
    if problem or parsed.problems:
        return
    # Bases first: what the file itself says is merged over them.
    for base in _bases(parsed, file, name, problems):
        _add(document, base, (*chain, file), problems)
    layer = _Layer(parsed, name, _resolve_tags(parsed))
    _merge(document, document.values, parsed.values, (), layer)
    document.whole |= layer.whole


def _text(file: FilePath, name: str) -> tuple[str, str]:
    """Return (text, problem); one of them is empty, or both for an empty file."""
    try:
        text = read_text(file)
    except ValueError as error:
        return "", f"{name}: {error}"
    # JSON may be indented by tabs, and YAML may not.
    return (text.replace("	", " ") if file.suffix == ".json" else text), ""


def _bases(parsed: Parsed, file: FilePath, name: str, problems: list[str]) -> list[FilePath]:
    value = parsed.values.pop(BASE_KEY, None)
    entries = value if isinstance(value, list) else [] if value is None else [value]
    bases = []
    for position, entry in enumerate(entries):
        line = parsed.lines.get((BASE_KEY, position), parsed.lines.get((BASE_KEY,)))
        if not isinstance(entry, str):
            problems.append(f"{name}:{line} {BASE_KEY}: given {entry!r}, expected the name of a file")
            continue
        base = _resolve(file.parent, entry)
        if base is not None and base.is_file():
            bases.append(base)
        else:
            problems.append(f"{name}:{line} {BASE_KEY}: no file {entry}; bases are named relative to the file")
    return bases


def _resolve(*parts: FilePath | str) -> FilePath | None:
    """Return the absolute path of joined parts, ``~`` expanded in the last; None if no file can have this path."""
    *folder, last = parts
    try:
        path = FilePath(*folder, FilePath(last).expanduser()).resolve()
        path.exists()
    # Raised for a name that is too long or contains a null, an unknown user, and a link to itself.
    except (OSError, ValueError, RuntimeError):
        return None
    return path


@dataclass(frozen=True, slots=True)
class _Layer:
    parsed: Parsed
    name: str
    whole: set[Path]

    def place(self, path: Path) -> FilePlace:
        return FilePlace(self.name, nearest(path, self.parsed.lines))


def _resolve_tags(parsed: Parsed) -> set[Path]:
    """Write the word of each tag into its mapping, and return the paths of such mappings."""
    whole = set()
    for path, tag in parsed.tags.items():
        container = lookup(parsed.values, path[:-1])
        if not path or not isinstance(container, dict | list):
            continue
        key: Any = path[-1]
        value = container[key]
        if isinstance(value, dict) or value is None:
            container[key] = {TAG_KEY: tag, **(value or {})}
            whole.add(path)
    return whole


def _merge(document: Document, into: dict[str, Any], values: dict[str, Any], path: Path, layer: _Layer) -> None:
    for key, value in values.items():
        here = (*path, key)
        previous = into.get(key)
        if (
            isinstance(value, dict)
            and isinstance(previous, dict)
            # A tag makes an object: merging the arguments of two of them would make one that no file describes.
            and here not in layer.whole
            and here not in document.whole
        ):
            document.places[here] = layer.place(here)
            _merge(document, previous, value, here, layer)
            continue
        for replaced in (here, *_below(previous, here)):
            document.places.pop(replaced, None)
            document.whole.discard(replaced)
        into[key] = value
        document.places.update((new_path, layer.place(new_path)) for new_path in (here, *_below(value, here)))


def _below(value: Any, path: Path) -> Iterator[Path]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _below(item, (*path, key))


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for position, item in enumerate(value):
            yield from _leaves(item, (*path, position))
    elif path:
        yield path
