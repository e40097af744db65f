"""Why the connection to a peer has ended, as a value; ``str`` of it is the one place that words it."""

from dataclasses import dataclass
from enum import Enum, auto


class Cause(Enum):
    """The ways in which a connection ends."""

    CLOSED_HERE = auto()
    """This process closed it."""
    CLOSED_THERE = auto()
    """The peer closed it, or its process ended."""
    SILENT = auto()
    """Nothing arrived for longer than the channel allows. The peer may still be running: perhaps only the network is
    broken."""
    NOT_READING = auto()
    """The peer reads nothing, and what is queued for it has reached the limit."""
    NO_MESSAGE = auto()
    """The peer sent a line that is no message."""
    LINE_TOO_LONG = auto()
    """The peer sent a line that is longer than any message may be."""
    CONNECTION_FAILED = auto()
    """The operating system reported an error while reading."""
    FAILED_HERE = auto()
    """The thread of the channel failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnection:
    """Why a connection has ended."""

    cause: Cause
    silent_s: float = 0.0
    """Seconds without a byte from the peer; only where the cause is ``SILENT``."""
    limit_bytes: int = 0
    """The limit that a line exceeded; only where the cause is ``LINE_TOO_LONG``."""
    detail: str = ""
    """The error, or the line that is no message, where the cause has one."""

    @property
    def is_silence(self) -> bool:
        """Return whether the peer fell silent. In every other case nothing of the connection is left."""
        return self.cause is Cause.SILENT

    def __str__(self) -> str:
        """Word the reason for people, to follow the name of the peer."""
        return {
            Cause.CLOSED_HERE: "closed here",
            Cause.CLOSED_THERE: "the connection was closed",
            Cause.SILENT: f"silent for {self.silent_s:.0f} s",
            Cause.NOT_READING: "takes nothing of what is sent",
            Cause.NO_MESSAGE: f"sent what is no message: {self.detail!r}",
            Cause.LINE_TOO_LONG: f"sent a line of more than {self.limit_bytes} bytes",
            Cause.CONNECTION_FAILED: f"the connection failed: {self.detail}",
            Cause.FAILED_HERE: f"failed: {self.detail}",
        }[self.cause]
