"""A spec as a command or a call asks for it: which one is read, and with which values."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, RunValues, Source

NOTHING: Mapping[str, Any] = MappingProxyType({})


class ReadSpec(Protocol):
    """Reads a spec with the values that were typed or passed, under the names that messages have for them."""

    def __call__(
        self, config: "Source", needed: Mapping[str, Any] = NOTHING, run: "RunValues | None" = None
    ) -> "Loaded":
        """Read ``config`` (None: the default spec).

        Args:
            config: as ``config.load`` takes it.
            needed: values by dotted path that the work needs besides; a ``Given`` has its own name for messages.
            run: what was chosen for the run that is resumed.

        Raises:
            SpecError: the spec or a value is wrong.
        """
        ...


def read_plain(config: "Source", needed: Mapping[str, Any] = NOTHING, run: "RunValues | None" = None) -> "Loaded":
    """Read a spec for which no value was typed or passed."""
    from mtrain.spec.config import load

    return load(config, flags=needed, run=run)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecRequest:
    """The spec that was asked for, and how it is read; weights of a run may replace the spec by that of the run."""

    config: "Source" = None
    """The spec that was named; None: none was."""
    read: ReadSpec = read_plain
