"""The ranks of one host, of a job on several hosts; on host 0 also the rendezvous, which is Horovod's own.

On each host ``python -m mtrain.backends._horovod.multi_host_starter --node-rank 1 --hosts 10.0.0.1:2,10.0.0.2:2 --rendezvous 10.0.0.1:29500
-- PYTHON -m mtrain.rank.worker ...``. horovodrun would reach the others over ssh sessions of its own, which nobody else can watch,
and listen on every interface.

A rank that fails is reported as horovodrun does, ``Process 3 exit with status code 137.``; the other ranks of this host are
then asked to end, and killed when they do not. SIGTERM asks all of them.
"""

import argparse
import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from mtrain.errors import Interrupted, LaunchError, MtrainError, UsageError
from mtrain.system import placement

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo

START_TIMEOUT_S = 60.0
"""For the rendezvous of host 0 to be there."""
FAILURE_GRACE_S = 5.0
"""For the other ranks to end after one has failed."""
REQUEST_GRACE_S = 30.0
"""For ranks that were asked to end: they save first."""
POLL_S = 0.05
PINNED = "GLOO_SOCKET_IFNAME"
"""Where the plan, or whoever starts this host's command, names the interface."""
Address = tuple[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of this host and wait for them; returns the status of the first one that failed, as a shell would."""
    given = _arguments(argv)
    try:
        hosts, meeting = [_pair(host) for host in given.hosts.split(",")], _pair(given.rendezvous)
        if not 0 <= given.node_rank < len(hosts):
            raise UsageError(f"--node-rank {given.node_rank}: expected 0 to {len(hosts) - 1}")
        own, _ = hosts[given.node_rank]
        slots = _slots(hosts)
        shared = _shared(meeting, interface=os.environ.get(PINNED) or _interface(own))
        ranks = Ranks()
        with ranks.taking_requests(), rendezvous(meeting, slots) if given.node_rank == 0 else ranks.met(meeting):
            for slot in (slot for slot in slots if slot.hostname == own):
                ranks.start(given.command, slot, shared)
            return ranks.wait()
    except MtrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrain.backends._horovod.multi_host_starter", description="started by `mtrain train`"
    )
    parser.add_argument("--node-rank", type=int, required=True, help="place of this host in --hosts")
    parser.add_argument("--hosts", required=True, help="ADDRESS:SLOTS of every host, with commas between")
    parser.add_argument("--rendezvous", required=True, help="ADDRESS:PORT on host 0")
    parser.add_argument("command", nargs="+", help="what a rank runs")
    return parser.parse_args(argv)


def _pair(text: str) -> Address:
    """``address:number``."""
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal():
        raise UsageError(f"{text!r} given; expected ADDRESS:NUMBER")
    return name, int(number)


def _slots(hosts: Sequence[Address]) -> "list[SlotInfo]":
    """Horovod's own order of ranks: host by host."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    total = sum(slots for _, slots in hosts)
    found: list[SlotInfo] = get_host_assignments([HostInfo(name, slots) for name, slots in hosts], total, total)
    return found


def _interface(own: str) -> str:
    """The interface that owns the address of this host; Horovod takes no address for its own end of a connection.

    Raises:
        UsageError: none does.
    """
    addresses = placement.own_addresses()
    found = placement.interface_of(addresses, [own, *placement.resolve(own)])
    if found is None:
        listed = ", ".join(f"{address} ({name})" for name, address in addresses)
        raise UsageError(
            f"{own} is no address of this host ({socket.gethostname()}), which has {listed}; correct --ips, or give the "
            "interface of the collectives (cluster.interface)"
        )
    return found


def _shared(meeting: Address, *, interface: str) -> dict[str, str]:
    """Variables that are the same for all ranks of this host."""
    address, port = meeting
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": (placement.resolve(address) or [address])[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _own(slot: "SlotInfo") -> dict[str, str]:
    """Who a rank is."""
    return {
        "HOROVOD_HOSTNAME": str(slot.hostname),
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }


@contextmanager
def rendezvous(meeting: Address, slots: "Sequence[SlotInfo]") -> Iterator[None]:
    """Horovod's rendezvous at one address while inside; it would listen on all of them.

    Raises:
        LaunchError: the port is taken, or the address is not of this host.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the DNS for the name of the address

    try:
        server = Server(meeting, RendezvousHandler, verbose=0)
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot meet at {meeting[0]}:{meeting[1]}: {error.strerror or error}; "
            "give another cluster.master_port, or end what listens there"
        ) from error
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Ranks:
    """Running ranks of this host by number."""

    running: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    asked: bool = False
    """Whether this process got SIGTERM or SIGINT."""

    @contextmanager
    def taking_requests(self) -> Iterator[None]:
        """While inside, SIGTERM and SIGINT ask instead of ending this process."""
        former = {number: signal.signal(number, self._take) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    @contextmanager
    def met(self, meeting: Address) -> Iterator[None]:
        """Enter once the rendezvous of host 0 can be reached; ranks themselves would try for two seconds.

        Raises:
            LaunchError: it cannot for ``START_TIMEOUT_S``.
            Interrupted: this host was asked to end.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.asked:
            try:
                socket.create_connection(meeting, timeout=2.0).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"nothing answers at {meeting[0]}:{meeting[1]} on host 0: {error}; start the job there, and let "
                        "its firewall pass the port"
                    ) from error
                time.sleep(POLL_S)
        if self.asked:
            raise Interrupted("ended before the ranks had met")
        yield

    def start(self, command: Sequence[str], slot: "SlotInfo", shared: Mapping[str, str]) -> None:
        """Start one.

        Raises:
            LaunchError: the program cannot be executed.
        """
        env = {**os.environ, **shared, **_own(slot)}
        try:
            self.running[slot.rank] = subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL)  # noqa: S603
        except OSError as error:
            self.send(signal.SIGKILL)
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error

    def wait(self) -> int:
        """Until all have ended. A failure, or a request, is passed on to those that still run."""
        first, deadline, told = 0, float("inf"), False
        while self.running:
            for rank, status in self._ended():
                first = first or status
                if status:
                    print(_report(rank, status, told=told), flush=True)
            if (self.asked or first) and not told:
                self.send(signal.SIGTERM)
                politely = self.asked or first == Interrupted.exit_code
                deadline, told = time.monotonic() + (REQUEST_GRACE_S if politely else FAILURE_GRACE_S), True
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)
        return first

    def _ended(self) -> list[tuple[int, int]]:
        """(rank, status as of a shell) of those that ended since the last look."""
        ended = [(rank, process.returncode) for rank, process in self.running.items() if process.poll() is not None]
        for rank, _ in ended:
            del self.running[rank]
        return [(rank, 128 - status if status < 0 else status) for rank, status in ended]

    def send(self, number: signal.Signals) -> None:
        """Signal those that run; not their children, which are theirs to end."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _report(rank: int, status: int, *, told: bool) -> str:
    """In the words of horovodrun, unless it ended because it was told to."""
    return (
        f"Process {rank} was told to end: status code {status}."
        if told
        else f"Process {rank} exit with status code {status}."
    )


if __name__ == "__main__":
    sys.exit(main())
