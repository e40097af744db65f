"""The hosts of a job as its leader knows them, and who brings them together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtrain.cluster.channel import Channel, Message
from mtrain.cluster.preflight.findings import Finding


@dataclass(kw_only=True)
class Member:
    """A host whose agent has said hello."""

    node: int
    host: str
    """Its address in the list of hosts."""
    channel: Channel
    hello: Message

    @property
    def label(self) -> str:
        """For people: its address, and the name it gives itself."""
        name = str(self.hello.get("host", ""))
        return f"{self.host} ({name})" if name and name != self.host else self.host


class Gathering(Protocol):
    """How agents come to a leader: it starts them over ssh, or people start the job on every host."""

    forwards: bool
    """Whether the leader's environment is passed on; else each host has the one of the shell it was started in."""

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """The members of ``nodes``, once all are there, or those that came within ``timeout_s`` or before ``stop`` said so, and
        why others did not.

        Can be called again for hosts that were lost.

        Raises:
            UsageError: a host refuses this job, or is refused.
        """
        ...

    def last_words(self, node: int) -> str:
        """What is known of the end of a host's connection, besides the channel's own reason; "" for nothing."""
        ...

    def let_go(self, node: int) -> None:
        """Close what connects a host, and wait for it."""
        ...

    def close(self) -> None:
        """Let go of all."""
        ...
