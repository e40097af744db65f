"""Join a job that is started by hand on every host: reach the first host, and serve it until its farewell."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable

from mtrain.errors import LaunchError, UsageError
from mtrain.jobs.hosts.admission import MAX_REASON, Party
from mtrain.jobs.hosts.agent import Agent, hello
from mtrain.jobs.hosts.channel import Channel, Lost
from mtrain.jobs.hosts.connections import CONNECT_S, SILENT_WAIT_S, channel_over, printable, source_for
from mtrain.jobs.hosts.handshake import Unproven, prove
from mtrain.jobs.hosts.messages import NOTHING, Farewell
from mtrain.system import names, processes

AGAIN_S = 0.3
"""Seconds between two attempts to connect to the first host."""


def join(party: Party, *, timeout_s: float, note: Callable[[str], None], again: bool) -> Farewell:
    """Serve the first host as agent until it sends its farewell, and return that.

    ``again``: reconnect when the first host is lost, because the job may be restarted there.

    Raises:
        LaunchError: the first host does not answer for ``timeout_s``, or is lost.
        UsageError: the first host refuses this one, did not start the job, or does not know the secret.
    """
    with processes.Requests() as requests, processes.adopting_orphans():
        deadline, told = time.monotonic() + timeout_s, False
        while True:
            channel = _reach_first(party, deadline=deadline, timeout_s=timeout_s, note=note, requests=requests)
            if channel is None:
                return Farewell(
                    code=processes.EXIT_CODES[requests.first or signal.SIGTERM], text=NOTHING, reason=NOTHING
                )
            # The description goes with the hello, so that a host that would train something else is refused before it waits.
            channel.send(hello(job=party.job()))
            try:
                farewell = Agent(channel, requests, note=lambda text: note(printable(text, MAX_REASON))).serve()
            except Lost as lost:
                # A connection that closes before any message was accepted by an earlier job that has just ended there.
                if not channel.spoken and time.monotonic() < deadline:
                    if not told:
                        told = True
                        note(f"{party.first} does not take this host yet; waiting until it does")
                    time.sleep(AGAIN_S)
                    continue
                reason = f"the first host, {party.first}, is lost: {lost}; everything of the job was ended here"
                if not again or requests.count:
                    raise LaunchError(reason) from None
                note(f"{reason}; waiting for it to start again")
                deadline = time.monotonic() + timeout_s
                continue
            finally:
                channel.close()
            if farewell.refusal is not None:
                raise UsageError(farewell.refusal)
            return farewell


def _reach_first(
    party: Party, *, deadline: float, timeout_s: float, note: Callable[[str], None], requests: processes.Requests
) -> Channel | None:
    """Connect to the first host, trying again until ``deadline``.

    Return None where a signal asks this process to end.
    """
    note_at = time.monotonic() + SILENT_WAIT_S
    while not requests.count:
        try:
            # The first host knows the others by the addresses of the list, and may refuse a call from another one.
            source = source_for(party.hosts[party.node], party.first)
            connection = socket.create_connection((party.first, party.port), timeout=CONNECT_S, source_address=source)
            if party.secret:
                _prove(connection, party.secret)
            return channel_over(connection, peer=party.first)
        except Unproven as error:
            raise UsageError(
                f"what answers at port {party.port} of {party.first} did not prove itself: {error}"
            ) from error
        except OSError as error:
            now, unknown = time.monotonic(), isinstance(error, socket.gaierror)
            if now > deadline and unknown:
                raise LaunchError(
                    f"{names.never([party.first], timeout_s)}, so the first host cannot be reached; correct --ips, or "
                    "enter the name into /etc/hosts"
                ) from error
            if now > deadline:
                raise LaunchError(
                    f"the first host, {party.first}, has not answered at port {party.port} for {timeout_s:.0f} s "
                    f"({error.strerror or error}); start the job there too: {party.line(0)}"
                ) from error
            if now > note_at:
                note_at = float("inf")
                why = f", until {names.in_words([party.first])} known here" if unknown else ""
                note(f"waiting for the first host, {party.first}{why}; start the job there too: {party.line(0)}")
            time.sleep(AGAIN_S)
    return None


def _prove(connection: socket.socket, secret: str) -> None:
    """Run the handshake as the host that joins, see ``prove``; close the connection where it fails."""
    try:
        asyncio.run(prove(connection, secret, joins=True))
    except BaseException:
        connection.close()
        raise
