"""Describe where the hosts of a job answer Prometheus, and what the leader tells them for it, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrain.spec.hostnames import bracket_host

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

OWN = "host"
"""Value of ``report.metrics_address`` that means the address of each host in the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsPlace:
    """The place at which each host of a job answers Prometheus."""

    port: int
    address: str
    """An IP address, or ``OWN``."""

    @classmethod
    def of(cls, spec: "Spec", mode: str) -> "MetricsPlace | None":
        """Return the place that a spec names; None: it names none, or the ranks do not train."""
        port = spec.report.metrics_port
        trains = mode in ("train", "script")
        return cls(port=port, address=spec.report.metrics_address) if port is not None and trains else None

    def on(self, host: str) -> "MetricsPlace":
        """Return the place on the host that has the address or name ``host`` in the job."""
        return MetricsPlace(port=self.port, address=host) if self.address == OWN else self

    def url(self) -> str:
        """Return the address for Prometheus, for people."""
        host = "HOST" if self.address == OWN else bracket_host(self.address)
        return f"http://{host}:{self.port}/metrics"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFacts:
    """The facts about an attempt that only the process which leads the job knows."""

    hosts: int
    """Number of hosts that take part."""
    restarts: int
    """How often the job was started again."""
    ranks: range
    """The ranks on this host."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "AttemptFacts":
        """Read the facts from a "start" message."""
        first = int(message["first_rank"])
        ranks = range(first, first + int(message["ranks"]))
        return cls(hosts=int(message.get("hosts", 1)), restarts=int(message.get("restarts", 0)), ranks=ranks)
