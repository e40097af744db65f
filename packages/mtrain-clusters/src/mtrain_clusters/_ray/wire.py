"""The channel between the leader of a job and the agent of one Ray node: its bytes travel in calls of an actor.

So the connection goes through whatever Ray's own connections go through, needs no port and no secret of its own, and ends
with the actor: when its node, its process or the whole Ray job ends.
"""

import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mtrain.jobs.hosts.channel import Channel
from mtrain_clusters._ray.placement import Placement

POLL_S = 1.0
"""Seconds after which a call of the actor that waits for bytes returns without any."""
CHUNK_BYTES = 1 << 16
WORDS_S = 3.0
"""Seconds that an agent may take to end after it has closed its connection."""
MAX_REASON = 200
"""How many characters are shown of what Ray says."""
_UNREACHABLE = re.compile(r"temporarily unavailable: (?:RpcError: )?(?:RPC error: )?(.+?)(?: rpc_code|\. |$)")
_DEAD = re.compile(r"The actor (?:died|is dead) because (.{1,200})")
SILENT_END_S = 0.2
"""Seconds that the agent of a silent host may take to end."""
END_S = 5.0
"""Seconds that threads may take to notice that their actor was killed."""


class Wire:
    """The connection to one agent. Two threads pass its bytes on between the actor and a socket, which the channel reads."""

    def __init__(self, placement: Placement, actor: Any, *, host: str) -> None:
        self._placement, self.ray, self._actor = placement, placement.ray, actor
        self.host = host
        """The host's address, once it is known; its name in the plan before."""
        self.status: int | None = None
        """Exit status of the agent, once it has ended."""
        self.lines: list[str] = []
        """The last lines of its standard error, once it has ended."""
        self._node_id = ""
        self._failure = ""
        """Why the actor ended, where the agent did not end by itself."""
        # The channel reads a file descriptor, as of any other connection.
        inner, self._outer = socket.socketpair()
        descriptor = inner.detach()
        self.channel = Channel(descriptor, descriptor, peer=host)
        self._reader = threading.Thread(target=self._read, name=f"from Ray node {host}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"to Ray node {host}", daemon=True)
        self._reader.start()
        self._writer.start()

    def last_words(self) -> str:
        """Return how the agent or its actor ended, or "" where both still run."""
        if self.channel.lost is not None and not self.channel.lost.is_silence:
            self._reader.join(WORDS_S + 1.0)
        if self._failure:
            return self._failure
        if self.status is None:
            return ""
        how = f"signal {-self.status}" if self.status < 0 else f"exit code {self.status}"
        return f"its agent ended with {how}" + (f": {self.lines[-1]}" if self.lines else "")

    @property
    def is_silent(self) -> bool:
        """Return whether the host was lost because it fell silent."""
        return self.channel.lost is not None and self.channel.lost.is_silence

    def has_ended(self, *, wait_s: float) -> bool:
        """Return whether the agent or its actor has ended, at the latest after ``wait_s``."""
        self._reader.join(wait_s)
        return not self._reader.is_alive()

    def ask_to_kill(self) -> Any:
        """Ask the actor to kill an agent that hangs; return Ray's reference to the answer, None where Ray is gone."""
        with suppress(Exception):
            return self._actor.kill.remote()
        return None

    def kill(self) -> None:
        """Have Ray end the actor."""
        with suppress(Exception):  # Ray itself may be gone.
            self.ray.kill(self._actor)

    def join(self, *, until: float) -> None:
        """Wait for the threads to notice that the actor is gone, and close their socket; ``until``: monotonic time."""
        for thread in (self._reader, self._writer):
            thread.join(max(0.0, until - time.monotonic()))
        if not self._reader.is_alive() and not self._writer.is_alive():
            self._outer.close()

    def _read(self) -> None:
        """Pass bytes from the agent on to the channel, until the agent or the actor has ended."""
        try:
            self._node_id = self.ray.get(self._actor.node.remote())
            self.host = self._placement.address(self._node_id)
            while (content := self.ray.get(self._actor.receive.remote(POLL_S))) is not None:
                self._outer.sendall(content)
            self.status, self.lines = self.ray.get(self._actor.words.remote(WORDS_S))
        except OSError:  # The channel was closed here.
            pass
        except Exception as error:  # Whatever Ray raises means that the actor, or Ray, is gone.
            self._failure = self._cause(error)
        finally:
            with suppress(OSError):
                self._outer.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """Pass bytes from the channel on to the agent, until the channel is closed."""
        with suppress(Exception):  # The reader finds out why.
            while content := self._outer.recv(CHUNK_BYTES):
                self.ray.get(self._actor.send.remote(content))
            self.ray.get(self._actor.close.remote())

    def _cause(self, error: Exception) -> str:
        """Return why the actor has ended, in one sentence."""
        deadline = time.monotonic() + POLL_S
        while self._node_id and time.monotonic() < deadline:
            if self._placement.is_dead(self._node_id):
                return "its Ray node has died"
            time.sleep(POLL_S / 5)
        text = " ".join(str(error).split())
        reason = _UNREACHABLE.search(text) or _DEAD.search(text)
        return f"its Ray actor is gone: {reason[1] if reason else text[:MAX_REASON]}"


def end_wires(wires: Sequence[Wire], *, wait_s: float, flush_s: float) -> None:
    """Close connections, upon which the agents end what they have started; then end the actors."""
    if not wires:
        return
    # An agent that was told to end may have closed its end first and needs its time; one of a silent host cannot be heard.
    began = time.monotonic()
    ends_at = [began + (min(SILENT_END_S, wait_s) if wire.is_silent else wait_s) for wire in wires]
    silent = [wire.is_silent for wire in wires]
    for wire in wires:
        # It may be hundreds of hosts that hang, so each step is begun on all of them before one is waited for.
        wire.channel.begin_closing(flush_s=flush_s)
    for wire in wires:
        wire.channel.close(flush_s=flush_s)
    hanging = [
        wire
        for wire, at, is_silent in zip(wires, ends_at, silent, strict=True)
        if not wire.has_ended(wait_s=max(0.0, at - time.monotonic())) and not is_silent
    ]
    if answers := [answer for wire in hanging if (answer := wire.ask_to_kill()) is not None]:
        with suppress(Exception):  # Ray itself may be gone.
            wires[0].ray.wait(answers, num_returns=len(answers), timeout=POLL_S)
    for wire in wires:
        wire.kill()
    until = time.monotonic() + END_S
    for wire in wires:
        wire.join(until=until)
