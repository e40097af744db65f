"""The hosts of a job as its supervisor sees them, and the interface of what connects a leader with its hosts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtrain.jobs.hosts.channel import Channel
from mtrain.jobs.hosts.disconnection import Disconnection
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.preflight.findings import Finding


class Connection(Protocol):
    """The way to a host: a channel to its agent, or direct calls if the host is this one. ``agent.py`` lists messages.

    Members have the same meaning as those of ``Channel``.
    """

    silence_s: float

    @property
    def lost(self) -> Disconnection | None: ...  # noqa: D102

    @property
    def silent_s(self) -> float: ...  # noqa: D102

    def send(self, message: Mapping[str, Any], /) -> None: ...  # noqa: D102

    def receive(self) -> list[Message]: ...  # noqa: D102


class Participant(Protocol):
    """A host that takes part in an attempt."""

    @property
    def node(self) -> int | None:
        """Return the index of the host in the list of hosts; None: it is the only host of the job."""

    @property
    def label(self) -> str:
        """Return the host's name for messages; empty if it is the only host of the job."""

    @property
    def channel(self) -> Connection: ...  # noqa: D102


@dataclass(kw_only=True)
class Member:
    """A host whose agent has connected and sent its hello."""

    node: int
    """Index of the host in the list of hosts."""
    host: str
    """The host's address in the list of hosts."""
    channel: Channel
    """The connection to the agent."""
    hello: Message
    """The agent's first message, see ``agent.py``."""

    @property
    def label(self) -> str:
        """Return the host's name for messages: its address, and the name that it reports where that differs."""
        name = str(self.hello.get("host", ""))
        return f"{self.host} ({name})" if name and name != self.host else self.host


class Gathering(Protocol):
    """Connects a leader with the agents of its hosts: started over ssh, or started by hand on every host."""

    forwards: bool
    """Whether the leader's environment variables are sent to the hosts; else each host keeps those of the shell it was
    started in."""

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Wait until the agents of all ``nodes`` have connected.

        Returns the members that have, and one finding for each host that has not when ``timeout_s`` has passed or
        ``stop`` returns True. Can be called again for hosts that were lost.

        Raises:
            UsageError: a host refuses this job, or is refused.
        """

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Return which of the absent ``nodes`` have connected by now; returns at once, and is called again and again.

        An elastic job asks for hosts that were lost, or have not come yet, while it runs on the others.
        """

    def leave_alone(self, node: int, *, seconds: float) -> None:
        """Let a host end that was asked to: ``arrivals`` does not fetch it for so long, but takes it if it comes."""

    def last_words(self, node: int) -> str:
        """Return how the process that connected a host ended, or "" where that is unknown."""

    def let_go(self, nodes: Sequence[int]) -> None:
        """Close the connections to hosts, beside one another, and wait until their processes have ended."""

    def close(self) -> None:
        """Close the connections to all hosts."""
