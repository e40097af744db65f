"""Defaults of the members of a task plugin that not every task needs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from mtrain.spec.section import Section


class NoOptions(BaseModel):
    """The options of a task: none so far."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskBase:
    """Base class of task plugins: see ``TaskKind`` of ``core.interfaces``, whose optional part it implements."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    sections: ClassVar[Mapping[str, type[Section]]] = {}

    @classmethod
    def divided(cls, data: Any, read_all: Callable[[], Any]) -> tuple[Any, Any] | None:
        """See ``TaskKind.divided``. By default a data set brings both splits."""
        return None

    @classmethod
    def prepared(cls, data: Any, content: Any) -> Any:
        """See ``TaskKind.prepared``. By default a split is used as it was read."""
        return content

    @classmethod
    def unreadable(cls, spec: Any, files: Sequence[Path]) -> dict[Path, str]:
        """See ``TaskKind.unreadable``. By default ``TaskKind.pictures`` finds out."""
        return {}

    @classmethod
    def model_options(cls, spec: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """See ``TaskKind.model_options``. By default there are none."""
        return {}
