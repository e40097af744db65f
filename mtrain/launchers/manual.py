"""Nothing is started: the line for each host is printed, for a person or a scheduler to run there."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.system.placement import CarryOptions, line_for


class Manual:
    """The command that was given here, with the place of each host."""

    class Options(CarryOptions):
        """Nothing beyond what every carrier takes."""

    carries: ClassVar[bool] = True
    starts: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        self.options = options

    def bring(self, host: str, node: int) -> Sequence[str]:
        """The same command on every host; it would find its place by address, and is told it all the same."""
        return line_for(self.options.line, node, carried=True)
