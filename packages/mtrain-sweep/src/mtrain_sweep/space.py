"""The search space of a sweep: which values of a spec are searched, and in which ranges.

A space is written in YAML, with the keys of a spec; dotted keys and nested ones mean the same::

    optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
    train:
      batch_size: {choices: [16, 32]}
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from mtrain.errors import SpecError, UsageError
from mtrain.spec.in_code import plain
from mtrain.spec.schema import dot
from mtrain.spec.section import Section
from mtrain.spec.sources import Given
from mtrain.spec.suggest import hint
from mtrain.spec.yaml_reader import Parsed, Path, parse, parse_value, read_text

KEYS = ("low", "high", "log", "step", "choices")
SPACES = FilePath(__file__).parent / "spaces"
"""Folder of the spaces that come with mtrain."""
SHORT_NAMES = {"backend": "backend.name", "ranks": "cluster.nproc_per_node"}
"""Words that ``--over`` takes in place of a path."""
MOST_CHOICES = 1000
Plain = str | int | float | bool | None


class Parameter(Section):
    """One value of the spec that is searched."""

    model_config = ConfigDict(extra="ignore")  # a folder of before has "start", which no sampler reads any more
    name: str = Field(description="its path in the spec")
    kind: Literal["float", "int", "choice"]
    low: float | int = 0
    high: float | int = 0
    log: bool = False
    step: float | int | None = None
    choices: tuple[Plain, ...] = ()
    """What the table shows; values that are lists or sections are shown as JSON."""
    settings: tuple[dict[str, Any], ...] = ()
    """For each choice, the values of the spec that it stands for, by dotted path."""
    origin: str = ""
    """File and line, for messages."""

    @model_validator(mode="after")
    def _check_values(self) -> "Parameter":
        is_choice = self.kind == "choice" and 0 < len(self.choices) == len(self.settings)
        is_range = self.kind != "choice" and self.low <= self.high and not (self.log and self.low <= 0)
        if not (is_choice or is_range) or (self.step is not None and self.step <= 0):
            raise ValueError(f"{self.name}: no value can be chosen")
        return self

    def assignments(self, value: Any) -> dict[str, Any]:
        """Return the values of the spec that ``value`` stands for, by dotted path."""
        if self.kind != "choice":
            return {self.name: value}
        return self.settings[self.index(value)]

    def index(self, value: Any) -> int:
        """Return the position of a choice. 1, 1.0 and true are different choices."""
        return next(i for i, one in enumerate(self.choices) if type(one) is type(value) and one == value)

    def grid(self) -> list[Any]:
        """Return all values, in order.

        Raises:
            UsageError: there is no end of them.
        """
        if self.kind == "choice":
            return list(self.choices)
        step = self.step or (1 if self.kind == "int" and not self.log else None)
        if step is None:
            raise UsageError(
                f"{self.origin}: {self.name}: a grid needs `choices`, or `step` beside `low` and `high`; or take another --sampler"
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MOST_CHOICES:
            raise UsageError(f"{self.origin}: {self.name}: {count} values in a grid; give a larger `step`")
        # Rounded, because 0.1 + 2 * 0.1 is not 0.3.
        return [round(self.low + i * step, 12) for i in range(count)]

    def extremes(self) -> list[Any]:
        """Return the values with which the schema is asked whether it allows this parameter."""
        return list(self.choices) if self.kind == "choice" else [self.low, self.high]


def shipped_spaces() -> list[str]:
    """Return the names of the spaces that ``--space`` takes without a path."""
    return sorted(file.stem for file in SPACES.glob("*.yml"))


def read_space(source: str | FilePath | Mapping[str, Any]) -> list[Parameter]:
    """Read a search space: a YAML file, the name of a shipped one, or its content.

    Raises:
        SpecError: it is no search space; a line for each mistake.
    """
    if isinstance(source, Mapping):
        return _parameters(Parsed(values=plain(source, where="space")), "space")
    file = FilePath(source)
    shipped = SPACES / f"{file}.yml"
    if not file.is_file() and str(source) in shipped_spaces():
        file = shipped
    elif not file.exists():
        raise SpecError(
            f"--space {source}: no such file, and no shipped space of that name{hint(str(source), shipped_spaces())}"
        )
    try:
        parsed = parse(read_text(file), name=file.name)
    except ValueError as error:
        raise SpecError(f"--space {source}: {error}") from error
    return _parameters(parsed, file.name)


def read_over(texts: Sequence[str]) -> list[Parameter]:
    """Read the values of ``--over``: ``backend=ddp,deepspeed:stage=3``, ``ranks=1,2`` or ``PATH=A,B``.

    Raises:
        UsageError: one is malformed.
    """
    parameters = []
    for text in texts:
        word, sign, values = text.partition("=")
        entries = [entry.strip() for entry in values.split(",") if entry.strip()]
        if not sign or not word or not entries:
            raise UsageError(f"--over {text}: expected backend=A,B or ranks=1,2 or PATH=A,B")
        name = SHORT_NAMES.get(word, word)
        settings = _backends(values) if name == "backend.name" else [{name: _parse(entry, text)} for entry in entries]
        labels = entries if name == "backend.name" else [_label(setting[name]) for setting in settings]
        _refuse_doubles(labels, f"--over {text}")
        parameters.append(
            Parameter(
                name=name, kind="choice", choices=tuple(labels), settings=tuple(settings), origin=f"--over {text}"
            )
        )
    return parameters


def _backends(text: str) -> list[dict[str, Any]]:
    from mtrain.compare.request import parse_variants

    settings: list[dict[str, Any]] = []
    for variant in parse_variants(text):
        values: dict[str, Any] = {"backend.name": variant.name}
        values |= {f"backend.options.{key}": value for key, value in variant.options.items()}
        for assignment in variant.overrides:
            path, _, value = assignment.partition("=")
            values[path] = _parse(value, assignment)
        settings.append(values)
    return settings


def _parse(entry: str, text: str) -> Any:
    try:
        return parse_value(entry)
    except ValueError as error:
        raise UsageError(f"--over {text}: {entry}: {error}") from error


def distinct(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters.

    Raises:
        UsageError: two have the same name, or there is none.
    """
    if not parameters:
        raise UsageError(
            "nothing is searched: name a search space with --space FILE, or values with --over backend=A,B"
        )
    for i, one in enumerate(parameters):
        for other in parameters[:i]:
            if one.name == other.name:
                raise UsageError(
                    f"{one.origin}: {one.name} is searched already, by {other.origin}; keep one of the two"
                )
    return tuple(parameters)


def _parameters(parsed: Parsed, name: str) -> list[Parameter]:
    problems, parameters = list(parsed.problems), []
    for path, entry in _leaves(parsed.values):
        origin = f"{name}{f':{line}' if (line := parsed.lines.get(path)) else ''}"
        try:
            parameters.append(_parameter(dot(path), entry, origin))
        except SpecError as error:
            problems.extend(error.problems)
    if not parameters and not problems:
        problems.append(
            f"{name}: names nothing to search; write for example `optimizer.learning_rate: {{low: 0.001, high: 0.1, log: true}}`"
        )
    if problems:
        raise SpecError(problems)
    return parameters


def _leaves(values: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and value and not {"low", "high", "choices"} & set(value):
            yield from _leaves(value, path)
        else:
            yield path, value


def _parameter(name: str, entry: Any, origin: str) -> Parameter:
    """Return the parameter that one entry describes.

    Raises:
        SpecError: it describes none.
    """
    where = f"{origin} {name}"
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: given {entry!r}, expected {{low: A, high: B}} or {{choices: [A, B]}}")
    for key in entry:
        if key not in KEYS:
            raise SpecError(f"{where}: unknown key {key!r}{hint(str(key), KEYS)}")
    if "choices" in entry:
        if len(entry) > 1:
            raise SpecError(
                f"{where}: `choices` goes with no other key; leave out {', '.join(set(entry) - {'choices'})}"
            )
        return _choice(name, entry["choices"], origin)
    return _range(name, entry, origin)


def _choice(name: str, values: Any, origin: str) -> Parameter:
    where = f"{origin} {name}"
    if not isinstance(values, list) or not values:
        raise SpecError(f"{where}: choices: given {values!r}, expected a list of values")
    labels = [_label(value) for value in values]
    if any(isinstance(label, float) and not math.isfinite(label) for label in labels):
        raise SpecError(f"{where}: choices: given {values!r}, expected finite numbers")
    _refuse_doubles(labels, where)
    settings = tuple({name: value} for value in values)
    return Parameter(name=name, kind="choice", choices=tuple(labels), settings=settings, origin=origin)


def _range(name: str, entry: Mapping[str, Any], origin: str) -> Parameter:
    where = f"{origin} {name}"
    low, high, step, log = entry.get("low"), entry.get("high"), entry.get("step"), entry.get("log", False)
    for key, value in (("low", low), ("high", high), *([("step", step)] if step is not None else [])):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpecError(f"{where}: {key}: given {'nothing' if value is None else repr(value)}, expected a number")
    assert low is not None
    assert high is not None
    if low >= high:
        raise SpecError(f"{where}: low {low} and high {high}: low must be the smaller one")
    if not isinstance(log, bool):
        raise SpecError(f"{where}: log: given {log!r}, expected true or false")
    if log and low <= 0:
        raise SpecError(f"{where}: low {low}: with `log: true` it must be > 0")
    if step is not None and (log or step <= 0):
        raise SpecError(f"{where}: step {step}: " + ("goes not with `log: true`" if log else "must be > 0"))
    whole = all(isinstance(value, int) for value in (low, high, *([step] if step is not None else [])))
    kind: Literal["int", "float"] = "int" if whole else "float"
    return Parameter(name=name, kind=kind, low=low, high=high, log=log, step=step, origin=origin)


def _label(value: Any) -> Plain:
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value)


def _refuse_doubles(labels: Sequence[Plain], where: str) -> None:
    for i, label in enumerate(labels):
        if any(label == other for other in labels[:i]):
            raise SpecError(f"{where}: the choice {label!r} is given twice")


def give_values(parameters: Sequence[Parameter], values: Mapping[str, Any]) -> dict[str, Given]:
    """Return values of parameters as values of the spec, by dotted path, as ``config.load`` takes them."""
    return {
        path: Given(setting, parameter.origin)
        for parameter in parameters
        for path, setting in parameter.assignments(values[parameter.name]).items()
    }
