"""Start nothing, but print the command for each host, for a person or a scheduler to run there."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.system.placement import CarryOptions, line_for


class Manual:
    """Plans the command that was typed here for every host, each with its own ``--node-rank``."""

    class Options(CarryOptions):
        """Nothing beyond what every carrier takes."""

    carries: ClassVar[bool] = True
    starts: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        self.options = options

    def bring(self, host: str, node: int) -> Sequence[str]:
        """Return the command for one host.

        Its index is stated explicitly, although the host could find it by its address.
        """
        return line_for(self.options.line, node, carried=True)
