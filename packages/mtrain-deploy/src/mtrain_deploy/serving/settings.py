"""What a server of predictions may be told: its address and its limits."""

from dataclasses import dataclass

from mtrain.errors import UsageError
from mtrain.spec.calls import explain_calls

MEGABYTE = 1_000_000
_LEAST = {
    "port": 0,
    "max_batch": 1,
    "max_wait_ms": 0,
    "max_body_mb": 1,
    "max_pixels": 1,
    "max_request_pixels": 1,
    "timeout_s": 1,
    "queue": 1,
    "threads": 1,
    "max_connections_per_address": 0,
}
_CHOSEN = ("max_batch", "max_request_pixels", "threads")
"""Settings that may be None."""
_MOST = {"port": 65535, "max_wait_ms": 10_000, "max_body_mb": 2000, "timeout_s": 3600, "queue": 100_000}


@explain_calls
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """The address and the limits of a server.

    Raises:
        UsageError: A value is out of range.
    """

    host: str = "127.0.0.1"
    """Name or address of the interface to listen on."""
    port: int = 8080
    """0: a free one."""
    max_batch: int | None = None
    """Largest number of images that are computed at once; None: the batch size of the file, else 8."""
    max_wait_ms: float = 0.0
    """How long an image waits for others to fill the batch, in milliseconds. Images that arrive while a batch is
    computed form the next one in any case."""
    max_body_mb: int = 16
    """Size of the largest request in megabytes (1,000,000 bytes)."""
    max_pixels: int = 50_000_000
    """Pixels of the largest image that is decoded."""
    max_request_pixels: int | None = None
    """Pixels of all images of a request together; None: twice ``max_pixels``."""
    timeout_s: float = 30.0
    """Seconds in which a request must have arrived, and in which it is answered."""
    queue: int = 64
    """Number of images that may be in work at once; further requests are refused."""
    threads: int | None = None
    """Threads that compute, and as many that decode; None: one for each usable core."""
    max_connections_per_address: int = 128
    """Connections that one address may have open at once; 0: as many as there are. Clients of a proxy have its address."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _CHOSEN:
                continue
            most = _MOST.get(name)
            if not (value >= least and (most is None or value <= most)):
                expected = f"{least} or more" if most is None else f"{least} to {most}"
                raise UsageError(f"serve: {name} is {value}; expected {expected}")

    @property
    def max_body_bytes(self) -> int:
        """Size of the largest request in bytes."""
        return self.max_body_mb * MEGABYTE

    @property
    def request_pixels(self) -> int:
        """Pixels of all images of a request together."""
        return 2 * self.max_pixels if self.max_request_pixels is None else self.max_request_pixels
