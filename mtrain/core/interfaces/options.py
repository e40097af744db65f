"""How a plugin is made: from its options."""

from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from mtrain.spec.section import NoOptions
from mtrain.spec.section import PluginOptions as PluginOptions


class FromOptions(Protocol):
    """A plugin that is made from its options; from their defaults where none are given."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    options: Any

    def __init__(self, options: Any = None) -> None:
        self.options = self.Options() if options is None else options
