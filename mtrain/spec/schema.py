"""Describe in words the values that a pydantic model accepts, for messages, ``config explain`` and the reference.

Validation errors of pydantic become lines such as ``train.batch_size: given 'eight', expected an integer > 0``.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mtrain.spec.suggest import OTHER_NAMES, closest, hint
from mtrain.spec.yaml_reader import Path, scalar, spelled_number

_WORDS: Mapping[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_MOST_PROBLEMS = 100
"""Largest number of mistakes that one message explains. The search for a similar word takes milliseconds for each."""
_DEEPEST = 20
"""Levels of mappings that ``leaves`` enters; a stranger's file may have thousands."""
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a spec: its path, the message, pydantic's name for the kind of error, and the value given."""

    path: Path
    message: str
    kind: str
    given: Any = None


def dot(path: Sequence[str | int]) -> str:
    """Return a path in dotted form: ``optimizer.groups.0`` for ``("optimizer", "groups", 0)``."""
    return ".".join(map(str, path))


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings that are none themselves, with their dotted paths; what is nested too deeply stays one."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value and above.count(".") < _DEEPEST:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values that an annotation allows, as in ``an integer > 0 or 'auto'``; empty if it sets no limits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return describe(inner, [*metadata, *_flatten(extra)])
    if origin in (Union, types.UnionType):
        return _either([describe(choice, metadata) for choice in get_args(annotation)])
    if origin is Literal:
        return _either([repr(choice) for choice in get_args(annotation)])
    if origin in (list, tuple, Sequence):
        items = [choice for choice in get_args(annotation) if choice is not Ellipsis]
        inner = describe(items[0]) if items else ""
        least = next((entry.min_length for entry in metadata if getattr(entry, "min_length", None)), 0)
        many = f"a list of at least {least}" if least else "a list"
        return f"{many}, each {inner}" if inner else many
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return "`key: value` pairs"
    if annotation in (None, types.NoneType):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with the keys " + ", ".join(annotation.model_fields)
    word = _WORDS.get(annotation, "")
    return f"{word}{_bounds(metadata)}" if word and annotation is not bool else word


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """Return the field at ``path``; None if there is none, or if ``path`` leads into a free mapping or a list item."""
    return _descend(model, path)[0]


def has_value(model: type[BaseModel], path: Path) -> bool:
    """Return whether ``model`` has a field at ``path``, or a free mapping or a list that ``path`` leads into."""
    return any(field_at(model, path[:length]) is not None for length in (len(path), *range(2, len(path))))


def _descend(model: type[BaseModel], path: Path) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """Return the field at ``path``, and the model of the section there, if it is one."""
    field: FieldInfo | None = None
    current: type[BaseModel] | None = model
    free = False
    for key in path:
        if free or isinstance(key, int) or key.isdigit():
            field, free = None, False
            continue
        if current is None or key not in current.model_fields:
            return None, None
        field = current.model_fields[key]
        current = model_of(field.annotation)
        free = get_origin(field.annotation) is dict
    return field, None if free else current


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model ``X`` inside an annotation such as ``X``, ``X | None`` or ``list[X]``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for choice in get_args(annotation) if (model := model_of(choice))), None)


def walk(model: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every field of a model and of its sections, in order, with its path. List items have the position ``0``."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        inner = model_of(field.annotation)
        if inner is not None:
            yield from walk(inner, (*path, 0) if get_origin(field.annotation) is list else path)


def problems_of(error: ValidationError, model: type[BaseModel], values: Any) -> list[Problem]:
    """Return the mistakes that ``error`` reports about ``values``, one per path, in the wording of this module."""
    problems: dict[Path, Problem] = {}
    items = error.errors(include_url=False, include_context=False)
    for item in items[:_MOST_PROBLEMS]:
        path = _real_path(item["loc"], values, item["type"])
        # Of a union pydantic reports an error for each member, and one sentence for each path is enough.
        if path not in problems or item["type"] == "value_error":
            problems[path] = Problem(path, _message(item, path, model), item["type"], item["input"])
    if len(items) > _MOST_PROBLEMS:
        path, last = problems.popitem()
        message = f"{last.message} (and {len(items) - _MOST_PROBLEMS} mistakes more)"
        problems[path] = Problem(path, message, last.kind, last.given)
    return list(problems.values())


def keys_at(model: type[BaseModel], path: Path) -> list[str]:
    """Return the keys that the section at ``path`` may have; empty for free mappings."""
    below = _descend(model, path)[1]
    return list(below.model_fields) if below is not None else []


def _message(item: Any, path: Path, model: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key" + _key_hint(str(path[-1]), path[:-1], model)
    expected = _expect(path, model)
    if item["type"] == "missing":
        return f"missing; expected {expected}" if expected else "missing"
    if item["type"] in ("value_error", "assertion_error"):
        return str(item["msg"]).split(", ", 1)[-1]
    value = item["input"]
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)  # as YAML writes them
    quotes = "; put it in quotes" if item["type"] == "string_type" and isinstance(value, int | float) else ""
    nearest = closest(value, choices(model, path)) if isinstance(value, str) else None
    meant = f"; did you mean {nearest!r}?" if nearest else ""
    return f"given {shown}, expected {expected or item['msg']}{quotes}{_zeros_hint(value)}{meant}"


def _zeros_hint(value: Any) -> str:
    """Say how a number is written that has zeros in front, which make it text; empty for other values."""
    number = spelled_number(value) if isinstance(value, str) else None
    if number is None:
        return ""
    octal = f"0o{number}" if number.isdigit() else ""
    other = scalar(octal)
    # YAML 1.1 reads 010 as 8, so whoever wrote it may have meant that.
    eight = f"; or {octal}, which is {other}" if isinstance(other, int) and other != scalar(number) else ""
    return f"; a number has no 0 in front ({number}{eight})"


def choices(model: type[BaseModel], path: Path) -> list[str]:
    """Return the words that the field at ``path`` accepts as values; for a truth value ``true`` and ``false``."""
    field = field_at(model, path)
    return [] if field is None else list(literals(field.annotation))


def literals(annotation: Any) -> Iterator[str]:
    """Yield the texts that an annotation lists with ``Literal``, at any depth; for a truth value ``true`` and ``false``."""
    if annotation is bool:
        yield from ("true", "false")
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from literals(argument)


def _key_hint(word: str, section: Path, model: type[BaseModel]) -> str:
    answer = hint(word, keys_at(model, section))
    if "did you mean" in answer:
        return answer
    # The word may be right or usual, and its section wrong.
    usual = (word, *OTHER_NAMES.get(word.lower(), ()))
    elsewhere = [dot(path) for name in usual for path, _ in walk(model) if path[-1] == name]
    if word in elsewhere:
        return f"; {word!r} belongs to no section: it is a key at the top"
    return f"; did you mean {elsewhere[0]!r}?" if elsewhere else answer


def _expect(path: Path, model: type[BaseModel]) -> str:
    """Describe the values allowed at ``path``, which may lead into a list; empty if the schema does not say."""
    position = len(path)
    while position and isinstance(path[position - 1], int):
        position -= 1
    field = field_at(model, path[:position])
    if field is None:
        return ""
    annotation: Any = field.annotation
    if position == len(path):
        return describe(annotation, field.metadata)
    for _ in path[position:]:
        annotation = next((choice for choice in get_args(annotation) if get_origin(choice) is list), annotation)
        annotation = (get_args(annotation) or (None,))[0]
    return describe(annotation)


def _real_path(location: tuple[int | str, ...], values: Any, kind: str) -> Path:
    """Return pydantic's error location as a path, without the tags that pydantic adds for the members of a union."""
    path: list[int | str] = []
    current = values
    for position, key in enumerate(location):
        last = position == len(location) - 1
        if isinstance(current, Mapping) and (key in current or (last and kind in ("missing", "extra_forbidden"))):
            path.append(key)
            current = current.get(key)
        # Whatever is not in the values is a tag, such as the name of a union's member.
        elif isinstance(current, list) and isinstance(key, int) and key < len(current):
            path.append(key)
            current = current[key]
    return tuple(path)


def _flatten(metadata: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for entry in metadata:
        flat.extend(entry.metadata if isinstance(entry, FieldInfo) else [entry])
    return flat


def _bounds(metadata: Sequence[Any]) -> str:
    parts = [
        f"{sign} {getattr(entry, name):g}"
        if isinstance(getattr(entry, name), float)
        else f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in _BOUNDS
        if getattr(entry, name, None) is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def _either(words: Sequence[str]) -> str:
    distinct = [word for word in dict.fromkeys(words) if word]
    if len(distinct) < 2:
        return "".join(distinct)
    return f"{', '.join(distinct[:-1])} or {distinct[-1]}"
