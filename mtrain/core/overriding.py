"""The decorator ``override``, which ``typing`` has from Python 3.12: type checkers read it, and it does nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import override  # Type checkers bring it; no package has to be installed for it.
else:

    def override(method):
        """Return the method as it is."""
        return method


__all__ = ["override"]
