"""Start the ranks of one host for a Horovod job on several hosts; on host 0 also run Horovod's own rendezvous.

On each host run ``python -m mtrain.backends._horovod.multi_host_starter --node-rank 1 --hosts 10.0.0.1:2,10.0.0.2:2
--rendezvous 10.0.0.1:29500 -- PYTHON -m mtrain.rank.worker ...``. horovodrun is not used, because it would reach the
other hosts over ssh sessions of its own, which nobody else can watch, and listen on every interface.

A failed rank is reported in the words of horovodrun, ``Process 3 exit with status code 137.``. The other ranks of this
host are then asked to end, and killed if they do not. SIGTERM is passed on to all ranks as such a request.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from mtrain.backends._horovod import internals
from mtrain.errors import Interrupted, LaunchError, MtrainError, UsageError
from mtrain.system import placement

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo

START_TIMEOUT_S = 60.0
"""Time that other hosts wait for the rendezvous on host 0."""
FAILURE_GRACE_S = 5.0
"""Time that the other ranks have to end after one has failed."""
REQUEST_GRACE_S = 30.0
"""Time that ranks have to end after they were asked to: they save first."""
POLL_S = 0.05
PINNED = "GLOO_SOCKET_IFNAME"
"""Variable in which the plan, or the user, names the network interface."""
Address = tuple[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of this host and wait for them; return the first failed rank's status as a shell would, or 0."""
    options = _arguments(argv)
    try:
        hosts, meeting = [_pair(host) for host in options.hosts.split(",")], _pair(options.rendezvous)
        if not 0 <= options.node_rank < len(hosts):
            raise UsageError(f"--node-rank {options.node_rank}: expected 0 to {len(hosts) - 1}")
        own, _ = hosts[options.node_rank]
        slots = _slots(hosts)
        shared = _shared_variables(meeting, interface=os.environ.get(PINNED) or _interface(own))
        ranks = Ranks()
        with (
            ranks.handling_signals(),
            rendezvous(meeting, slots) if options.node_rank == 0 else ranks.waiting_for_rendezvous(meeting),
        ):
            for slot in (slot for slot in slots if slot.hostname == own):
                ranks.start(options.command, slot, shared)
            return ranks.wait()
    except MtrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrain.backends._horovod.multi_host_starter", description="started by `mtrain train`"
    )
    parser.add_argument("--node-rank", type=int, required=True, help="number of this host in --hosts, from 0")
    parser.add_argument("--hosts", required=True, help="ADDRESS:SLOTS of every host, with commas between")
    parser.add_argument("--rendezvous", required=True, help="ADDRESS:PORT on host 0")
    parser.add_argument("command", nargs="+", help="what a rank runs")
    return parser.parse_args(argv)


def _pair(text: str) -> Address:
    """Parse ``address:number``."""
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal():
        raise UsageError(f"{text!r} given; expected ADDRESS:NUMBER")
    return name, int(number)


def _slots(hosts: Sequence[Address]) -> "list[SlotInfo]":
    """Assign ranks to hosts in Horovod's own order: host by host."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    total = sum(slots for _, slots in hosts)
    assignments: list[SlotInfo] = get_host_assignments([HostInfo(name, slots) for name, slots in hosts], total, total)
    return assignments


def _interface(own: str) -> str:
    """Return the network interface that has address ``own``: Horovod's connections are bound by interface.

    Raises:
        UsageError: No interface of this host has the address.
    """
    addresses = placement.own_addresses()
    interface = placement.interface_of(addresses, [own, *placement.resolve(own)])
    if interface is None:
        listed = ", ".join(f"{address} ({name})" for name, address in addresses)
        raise UsageError(
            f"{own} is no address of this host ({socket.gethostname()}), which has {listed}; correct --ips, or give the "
            "interface of the collectives (cluster.interface)"
        )
    return interface


def _shared_variables(meeting: Address, *, interface: str) -> dict[str, str]:
    """Return the environment variables that are the same for all ranks of this host."""
    address, port = meeting
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": (placement.resolve(address) or [address])[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _identity_variables(slot: "SlotInfo") -> dict[str, str]:
    """Return the environment variables that tell a rank its number and its host."""
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
    """Run Horovod's rendezvous server at one address while inside; by default it would listen on every interface.

    Raises:
        LaunchError: The port is in use, or the address does not belong to this host.
    """
    try:
        server = internals.rendezvous_server(meeting)
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
    """The ranks of this host: starts them, waits for them and ends them."""

    running: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    """Processes that have not ended, by rank."""
    end_requested: bool = False
    """Whether this process got SIGTERM or SIGINT."""

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Record SIGTERM and SIGINT in ``end_requested`` while inside, instead of ending this process."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.end_requested = True

    @contextmanager
    def waiting_for_rendezvous(self, meeting: Address) -> Iterator[None]:
        """Wait on entry until the rendezvous of host 0 can be reached; the ranks themselves try for two seconds only.

        Raises:
            LaunchError: It could not be reached for ``START_TIMEOUT_S``.
            Interrupted: This host was asked to end.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.end_requested:
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
        if self.end_requested:
            raise Interrupted("ended before the ranks had met")
        yield

    def start(self, command: Sequence[str], slot: "SlotInfo", shared: Mapping[str, str]) -> None:
        """Start the rank of ``slot``.

        Raises:
            LaunchError: The program cannot be executed.
        """
        env = {**os.environ, **shared, **_identity_variables(slot)}
        try:
            self.running[slot.rank] = subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL)  # noqa: S603
        except OSError as error:
            self.send(signal.SIGKILL)
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error

    def wait(self) -> int:
        """Wait until all ranks have ended; return the status of the first that failed, or 0.

        After a failure or a request to end, the ranks that still run are asked to end, and killed if they do not.
        """
        first_failure, deadline, ending = 0, float("inf"), False
        while self.running:
            for rank, status in self._ended():
                first_failure = first_failure or status
                if status:
                    print(_report(rank, status, ending=ending), flush=True)
            if (self.end_requested or first_failure) and not ending:
                self.send(signal.SIGTERM)
                on_request = self.end_requested or first_failure == Interrupted.exit_code
                deadline, ending = time.monotonic() + (REQUEST_GRACE_S if on_request else FAILURE_GRACE_S), True
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)
        return first_failure

    def _ended(self) -> list[tuple[int, int]]:
        """Return (rank, status as a shell reports it) of the ranks that ended since the last call."""
        ended = [(rank, process.returncode) for rank, process in self.running.items() if process.poll() is not None]
        for rank, _ in ended:
            del self.running[rank]
        return [(rank, 128 - status if status < 0 else status) for rank, status in ended]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the running ranks, but not to their children, which the ranks end themselves."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _report(rank: int, status: int, *, ending: bool) -> str:
    """Return the message about an ended rank: in the words of horovodrun, unless the rank was asked to end."""
    return (
        f"Process {rank} was told to end: status code {status}."
        if ending
        else f"Process {rank} exit with status code {status}."
    )


if __name__ == "__main__":
    sys.exit(main())
