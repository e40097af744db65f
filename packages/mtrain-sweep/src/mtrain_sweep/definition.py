"""What a sweep searches, as its folder keeps it: everything that decides its table."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from mtrain.errors import SpecError, UsageError
from mtrain.spec import config, outputs
from mtrain.spec.files import read_bytes
from mtrain.spec.schema import field_at, leaves
from mtrain.spec.section import Section
from mtrain.spec.yaml_reader import dump
from mtrain_sweep.space import Parameter, give_values

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

DEFINITION, BASE = "sweep.json", "base.yml"
"""Files of a sweep's folder: the definition, and the spec that its trials change."""
FILES = {DEFINITION, f".{DEFINITION}", BASE}
MAX_DEFINITION_BYTES = 16 << 20
USED = ("backend", "cluster", "report")
"""Sections of the spec that a sweep itself looks into."""
DEFAULT_TRIALS = 20
SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("none", "median", "halving")
Sampler = Literal["grid", "random", "tpe"]
Pruner = Literal["none", "median", "halving"]
Direction = Literal["max", "min"]


class SweepDefinition(Section):
    """A sweep, without how it is run: the number of trials at once, for example."""

    sampler: Sampler
    pruner: Pruner
    metric: str = Field(min_length=1)
    direction: Direction
    seed: int = Field(ge=0)
    trials: int = Field(ge=1)
    """Number of trials in all; the only value that may change when the sweep is resumed."""
    parameters: tuple[Parameter, ...]
    folder: str
    """Working directory of the trials, absolute."""
    base: dict[str, Any]
    """All values of the spec."""
    file: Path | None = Field(default=None, exclude=True)
    """The file that it was read from, which may be somebody else's: code that it names is refused. None: the user has said it."""

    @property
    def grid_size(self) -> int:
        """Return the number of points of the grid.

        Raises:
            UsageError: a parameter has no end of values.
        """
        size = 1
        for parameter in self.parameters:
            size *= len(parameter.grid())
        return size

    def better(self, value: float, than: float | None) -> bool:
        """Return whether one value of the metric is better than another; anything is better than None."""
        return than is None or (value > than if self.direction == "max" else value < than)

    def trial_spec(
        self,
        params: Mapping[str, Any],
        *,
        report: Mapping[str, Any] | None = None,
        gpus: Sequence[str] | None = None,
    ) -> "Loaded":
        """Return the spec of a trial.

        Args:
            params: Values of the trial.
            report: Values of its section ``report``; None: those of the spec itself.
            gpus: What it has of the GPUs that ``cluster.devices`` lists, if the spec sets that key.

        Raises:
            SpecError: the values of the trial do not go together, or name code that nobody but the folder has named.
        """
        values = {**self.base, "report": {**self.base["report"], **(report or {})}}
        if gpus is not None and self.base["cluster"].get("devices") is not None:
            values["cluster"] = {**self.base["cluster"], "devices": [int(number) for number in gpus]}
        loaded = config.load(values, flags=give_values(self.parameters, params), environ={}, folder_file=self.file)
        return dataclasses.replace(loaded, source="the spec of the sweep")


def parsed_metric(text: str) -> tuple[str, Direction]:
    """Return the name of a metric and its direction, from ``NAME``, ``NAME:max`` or ``NAME:min``.

    Raises:
        UsageError: it is none of these.
    """
    name, sign, direction = text.rpartition(":")
    if not sign:
        name, direction = text, "max"
    if not name or direction not in ("max", "min"):
        raise UsageError(f"--metric {text}: expected NAME, NAME:max or NAME:min; NAME is a metric of the evaluations")
    return name, "max" if direction == "max" else "min"


def fit_space(parameters: Sequence[Parameter], loaded: "Loaded") -> tuple[Parameter, ...]:
    """Check a space against the schema of the job, and return it.

    A range of whole numbers becomes one of numbers where the schema asks for a number.

    Raises:
        SpecError: a key is unknown or a value is not allowed; a line for each mistake.
    """
    if own := [one for one in parameters if one.name.partition(".")[0] == "report"]:
        raise SpecError(
            [f"{one.origin}: {one.name}: each trial has a report of its own; search another value" for one in own]
        )
    schema = type(loaded.spec)
    typed = [_typify(parameter, schema) for parameter in parameters]
    problems: list[str] = []
    for i in range(max(len(parameter.extremes()) for parameter in typed)):
        values = {one.name: one.extremes()[min(i, len(one.extremes()) - 1)] for one in typed}
        try:
            config.load(dict(loaded.values), flags=give_values(typed, values), environ={})
        except SpecError as error:
            problems.extend(error.problems)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return tuple(typed)


def _typify(parameter: Parameter, schema: Any) -> Parameter:
    if parameter.kind != "int":
        return parameter
    field = field_at(schema, tuple(int(part) if part.isdigit() else part for part in parameter.name.split(".")))
    is_number = field is not None and "float" in str(field.annotation)
    return parameter.model_copy(update={"kind": "float"}) if is_number else parameter


def write(definition: SweepDefinition, folder: Path) -> None:
    """Write a definition into the folder of its sweep, the file that marks the folder last.

    Raises:
        UsageError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = dump(definition.base)
        outputs.write_text(folder / BASE, text)
        outputs.write_text(folder / DEFINITION, definition.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written to: {error.strerror or error}") from error


def read(folder: Path) -> SweepDefinition:
    """Read the definition of a sweep.

    Raises:
        UsageError: the folder is not that of a sweep.
    """
    file = folder / DEFINITION
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder of a sweep, such as runs/digits-sweep")
    if not file.is_file():
        raise UsageError(f"{folder}: is not the folder of a sweep (it has no {DEFINITION})")
    try:
        definition = SweepDefinition.model_validate_json(read_bytes(file, limit=MAX_DEFINITION_BYTES))
        if not all(isinstance(definition.base.get(name), dict) for name in USED):
            raise ValueError(f"base lacks one of {', '.join(USED)}")
        return definition.model_copy(update={"file": file})
    except (OSError, ValidationError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not what a sweep writes"
        raise UsageError(f"{file}: cannot be read: {reason}; the file is damaged, or another program's") from error


def difference(old: SweepDefinition, new: SweepDefinition) -> str:
    """Return in words what a resumed sweep would do differently; empty: nothing."""
    for name in ("sampler", "pruner", "metric", "direction", "seed"):
        if getattr(old, name) != getattr(new, name):
            return f"{name}: {getattr(old, name)} before, {getattr(new, name)} now"
    hidden = {"origin"}
    spaces = [{one.name: one.model_dump(exclude=hidden) for one in definition.parameters} for definition in (old, new)]
    if changed := sorted({name for name in (*spaces[0], *spaces[1]) if spaces[0].get(name) != spaces[1].get(name)}):
        return f"the search space of {', '.join(changed)}"
    before, now = (dict(leaves(json.loads(json.dumps(one.base)))) for one in (old, new))
    try:
        # Read again, so that a key that is newer than the sweep has its default: it is no change of the user's.
        read_again = config.load(old.base, environ={}, folder_file=old.file).values if before != now else old.base
        before = dict(leaves(json.loads(json.dumps(read_again))))
    except SpecError:  # It names code. Where the user names the same, the rest is compared as it was written.
        before = {**now, **before}
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return f"{keys[0]}: {before.get(keys[0])} before, {now.get(keys[0])} now" if keys else ""
