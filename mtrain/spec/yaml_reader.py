"""Read YAML text into plain values, with the line number of each value.

Only a safe subset is accepted: no tags that build objects, no duplicate keys, no deep nesting, no aliases that expand
to very many values. Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), so that
``1e-3`` is a number and ``no``, ``1:30``, ``2024-01-01`` are text. Two things are not of that schema: single ``_`` between
digits are left out (``1_000``), and a number with a 0 in front, such as ``010``, is text, because readers of YAML 1.1 take
it for octal and those of 1.2 for decimal.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeAlias, TypeVar

import yaml

from mtrain.spec.files import open_file

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the top of a document to a value."""
T = TypeVar("T")

MAX_DEPTH = 40
MAX_VALUES = 30_000
"""Largest number of values in a document; the longest useful list has 21,841 (the class names of ImageNet-21k)."""
MAX_BYTES = 1_000_000
LARGEST = 2**63 - 1
"""Largest absolute value of an integer. A larger one is read as a float; no integer of a spec is that large."""

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"^(?:null|Null|NULL|~|)\Z")
_DIGITS = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_INT = re.compile(rf"^[-+]?(?:0x[0-9a-fA-F]{{1,3000}}|0o[0-7]{{1,3000}}|(?=[0-9_]{{1,3001}}\Z){_DIGITS})\Z")
"""At most about 3,000 digits: Python refuses to convert numbers of more than 4,300 digits."""
_FLOAT = re.compile(rf"^[-+]?(?:{_DIGITS}?\.[0-9]+|{_DIGITS}\.?)(?:[eE][-+]?[0-9]+)?\Z")
_NUMBER_ELSEWHERE = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?\Z")
"""Text that a reader of another edition of YAML may take for a number."""
_SPECIAL = re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_PLAIN = re.compile(r"^[A-Za-z_./][\w./+-]*\Z")
_TAG = "tag:yaml.org,2002:"
_LOCAL_TAG = re.compile(r"^!\w+\Z")


def nearest(path: Path, known: Mapping[Path, T]) -> T | None:
    """Return what is known of ``path``, or else of the nearest value around it; None if nothing is."""
    return next((known[path[:length]] for length in range(len(path), 0, -1) if path[:length] in known), None)


@dataclass(slots=True)
class Parsed:
    """The content of one YAML document.

    ``lines`` holds the line number (from 1) of each value, ``problems`` one line of text per mistake. ``tags`` holds
    the names of local tags such as ``!Name`` if ``parse`` was called with ``local_tags``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tags: dict[Path, str] = field(default_factory=dict)


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar: None, a bool, an int, a float or the text itself."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        digits = text.replace("_", "")
        number = int(digits, 0) if "x" in digits or "o" in digits else int(digits)
        return number if abs(number) <= LARGEST else _as_float(number)
    if _SPECIAL.match(text):
        return float(text.lower().replace(".", ""))
    return float(text.replace("_", "")) if _FLOAT.match(text) else text


def spelled_number(text: str) -> str | None:
    """Return the number that ``text`` would be without the zeros in front; None if it has none, or is no number."""
    sign, digits = (text[:1], text[1:]) if text[:1] in ("-", "+") else ("", text)
    shorter = re.sub("^0+(?=[0-9])", "", digits)
    return sign + shorter if shorter != digits and not isinstance(scalar(shorter), str) else None


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


class _Loader(yaml.SafeLoader):
    """Composes nodes without resolving scalars."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.count += index is not None  # PyYAML passes None for keys, which do not count as values.
        # Refused while the text is read: a list of a megabyte, or a thousand brackets, would cost seconds or the stack.
        if self.count > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES} values", problem_mark=self.line_mark())
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=self.line_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def line_mark(self) -> Any:
        """Return the current position in the text."""
        return self.get_mark()


_Loader.yaml_implicit_resolvers = {}


class TooManyValues(Exception):
    """Raised if aliases expand to more than ``MAX_VALUES`` values, or contain themselves."""


def read_text(file: FilePath) -> str:
    """Return the text of a settings file of at most ``MAX_BYTES`` bytes.

    Raises:
        ValueError: it is not a regular file, cannot be read, is longer, or is not UTF-8; the message says which.
    """
    try:
        if not file.is_file():
            raise ValueError("is no file" if file.exists() else "no such file")
        with open_file(file) as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes; this is no file that mtrain reads settings from")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8 text") from error


def parse(text: str, *, name: str, local_tags: bool = False) -> Parsed:
    """Parse a document whose top level is a mapping. Every mistake becomes a line ``name:line: ...`` in ``problems``.

    ``local_tags``: a tag ``!Name`` before a value is recorded in ``tags``, and the value stays plain; without it such a
    tag is a mistake.
    """
    parsed = Parsed()
    if len(text) > MAX_BYTES:
        parsed.problems.append(f"{name}: {len(text)} characters, more than a spec can have ({MAX_BYTES})")
        return parsed
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        parsed.problems.append(_syntax_problem(error, name))
        return parsed
    if node is None:
        return parsed
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        parsed.problems.append(f"{name}:{line}: expected `key: value` lines at the top of the file")
        return parsed
    try:
        parsed.values = _Builder(name, parsed, local_tags=local_tags).build(node, ())
    except TooManyValues:
        parsed.problems.append(
            f"{name}: aliases expand without end or to more than {MAX_VALUES} values; write them out"
        )
        parsed.values = {}
    return parsed


def parse_value(text: str) -> Any:
    """Return the value of ``-o path=text``: a scalar, a list or mapping in brackets, or a list written as ``a,b``.

    Quoted text that is not valid YAML is returned as it is.

    Raises:
        ValueError: the text begins with a bracket and is not a valid list or mapping.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        parsed = parse("value: " + stripped, name="value")
        if not parsed.problems:
            return parsed.values.get("value")
        if stripped[0] in "[{":
            kind = "list" if stripped[0] == "[" else "mapping"
            reason = parsed.problems[0].partition(" ")[2]
            raise ValueError(
                f"begins as a {kind} and is none: {reason} (a backslash needs single quotes in YAML: ['a\\.b'])"
            )
        return text
    # A shell takes brackets for patterns, so a list can be written without them.
    if "," in stripped:
        return [scalar(part.strip()) for part in stripped.split(",") if part.strip()]
    return scalar(stripped)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _syntax_problem(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    return f"{where}: not valid YAML: {what}{f' ({context})' if context else ''}".replace("\n", " ")


class _Builder:
    """Converts YAML nodes to values in one pass, which also records line numbers and counts values."""

    def __init__(self, name: str, parsed: Parsed, *, local_tags: bool) -> None:
        self._name = name
        self._local_tags = local_tags
        self._parsed = parsed
        self._count = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        # Counted again, because an alias of a few characters repeats all that its anchor holds.
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise TooManyValues
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, "map", path)
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq", path)
            return self._sequence(node, path)
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        self._check_tag(node, "str", path)
        plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag != "!"
        return scalar(node.value) if plain else node.value

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        values = []
        for position, item in enumerate(node.value):
            self._parsed.lines[(*path, position)] = item.start_mark.line + 1
            values.append(self.build(item, (*path, position)))
        return values

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, path, "a key must be a word, not a list or a mapping")
                continue
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                merged = {**self._merge(value_node, path, line), **merged}
                continue
            if key in first_lines:
                self._problem(line, (*path, key), f"given twice, first on line {first_lines[key]}; keep one")
                continue
            first_lines[key] = line
            self._parsed.lines[(*path, key)] = line
            values[key] = self.build(value_node, (*path, key))
        return {**merged, **values}

    def _merge(self, node: yaml.Node, path: Path, line: int) -> Mapping[str, Any]:
        """Return the keys that ``<<: *anchor`` merges into a mapping. The mapping's own keys take precedence."""
        value = self.build(node, (*path, "<<"))
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            self._problem(line, path, "`<<` takes a mapping, for example `<<: *anchor`")
            return {}
        together: dict[str, Any] = {}
        for part in parts:
            for key, value in part.items():
                together.setdefault(key, value)
        for key in together:
            self._parsed.lines.setdefault((*path, key), line)
        return together

    def _check_tag(self, node: yaml.Node, kind: str, path: Path) -> None:
        if self._local_tags and _LOCAL_TAG.match(node.tag):
            self._parsed.tags[path] = node.tag.removeprefix("!")
        elif node.tag not in (_TAG + kind, "!"):
            tag = node.tag.replace(_TAG, "!!")
            self._problem(node.start_mark.line + 1, path, f"the tag {tag} is not allowed; write plain values")

    def _problem(self, line: int, path: Path, message: str) -> None:
        where = ".".join(map(str, path))
        self._parsed.problems.append(f"{self._name}:{line}{' ' + where if where else ''}: {message}")


def flow(value: Any) -> str:
    """Write plain data as one line of YAML, which ``parse`` reads back unchanged."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return _word(value)
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _word(text: str) -> str:
    """Write text as a YAML scalar: without quotes where YAML would read it as the same text, otherwise in quotes."""
    if _PLAIN.match(text) and isinstance(scalar(text), str):
        return text
    # Single quotes escape nothing, so a pattern with backslashes stays as it was written.
    if text.isascii() and text.isprintable() and "'" not in text:
        return f"'{text}'"
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isascii() and character.isprintable():
        return character
    return f"\\U{ord(character):08X}"


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that this module would read as something else, such as ``0008`` or ``1e3``."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Other readers follow other editions: 010 is 8 in YAML 1.1 and 10 in YAML 1.2.
    is_plain = isinstance(scalar(text), str) and not _NUMBER_ELSEWHERE.match(text)
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if is_plain else "'")


_Dumper.add_representer(str, _represent_text)


def dump(values: Mapping[str, Any], *, inline: bool = False) -> str:
    """Return values as YAML that ``parse`` reads as the same values, in their order.

    ``inline``: lists and mappings that contain neither are written in one line.
    """
    style: dict[str, Any] = {"default_flow_style": None, "width": 110} if inline else {}
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return text


def dumped_all(documents: Iterable[Any]) -> str:
    """Return several documents as YAML whose text no reader of YAML 1.2 takes for numbers."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
