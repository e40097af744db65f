"""The base class of a spec's sections, and types of values that several sections have."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mtrain.errors import SpecError, UsageError


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"given {pattern!r}, expected a regular expression: {error}") from None
    return pattern


def as_validator(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return ``check``, which raises ``UsageError``, as pydantic needs it: a mistake is a ``ValueError`` there."""

    def validate(text: str) -> str:
        try:
            return check(text)
        except UsageError as error:
            raise ValueError(f"given {error}") from None

    return validate


Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, searched in parameter names."""


@dataclass(frozen=True, slots=True)
class Off:
    """Metadata of a key: the value that switches it off. A key without it is off at its default.

    A spec for another task, which does not have the key, may hold that value: it asks for nothing.
    """

    value: Any


class Section(BaseModel):
    """Base class of all sections. It refuses unknown keys, wrong types and non-finite numbers; values are frozen."""

    # Strict: YAML has types of its own, so a value of another one is a mistake, such as a number in quotes.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class PluginOptions(BaseModel):
    """Base class of the options of plugins. It refuses unknown keys; values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoOptions(PluginOptions):
    """The options of a plugin that has none."""


S = TypeVar("S", bound=Section)


def narrowed(section: Section, kind: type[S], *, where: str) -> S:
    """Return ``section`` as the class that a task declares for it; ``where`` is its path in the spec.

    Raises:
        SpecError: it is the section of a job of another task.
    """
    if not isinstance(section, kind):
        raise SpecError(
            f"{where}: the spec is that of another task; model.name and data.format must name plugins of one task"
        )
    return section
