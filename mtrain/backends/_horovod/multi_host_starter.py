"""Start the ranks of one host for a Horovod job on several hosts; on host 0 also run Horovod's own rendezvous.

On each host run ``python -m mtrain.backends._horovod.multi_host_starter --node-rank 1 --hosts 10.0.0.1:2,10.0.0.2:2
--rendezvous 10.0.0.1:29500 -- PYTHON -m mtrain.rank.worker ...``. horovodrun is not used, because it would reach the
other hosts over ssh sessions of its own, which nobody else can watch, and listen on every interface.

When a rank fails, the others of this host are asked to end, and killed if they do not. SIGTERM is passed on to all ranks as
such a request.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mtrain.backends._horovod import internals
from mtrain.errors import Interrupted, LaunchError, MtrainError, UsageError
from mtrain.system import placement
from mtrain.system.rank_starter import POLL_S, Ranks, status_for_shell

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo

START_TIMEOUT_S = 60.0
"""Time that other hosts wait for the rendezvous on host 0."""
FAILURE_GRACE_S = 5.0
"""Time that the other ranks have to end after one has failed."""
REQUEST_GRACE_S = 30.0
"""Time that ranks have to end after they were asked to: they save first."""
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
        ranks = Ranks(failure_grace_s=FAILURE_GRACE_S, request_grace_s=REQUEST_GRACE_S, saved=Interrupted.exit_code)
        with (
            ranks.handling_signals(),
            rendezvous(meeting, slots) if options.node_rank == 0 else waiting_for_rendezvous(meeting, ranks),
        ):
            for slot in (slot for slot in slots if slot.hostname == own):
                ranks.start(slot.rank, options.command, {**shared, **_identity_variables(slot)})
            failed = ranks.wait()
        return status_for_shell(failed[0][1]) if failed else 0
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


@contextmanager
def waiting_for_rendezvous(meeting: Address, ranks: Ranks) -> Iterator[None]:
    """Wait on entry until the rendezvous of host 0 can be reached; the ranks themselves try for two seconds only.

    Raises:
        LaunchError: It could not be reached for ``START_TIMEOUT_S``.
        Interrupted: This host was asked to end.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ranks.end_requested:
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
    if ranks.end_requested:
        raise Interrupted("ended before the ranks had met")
    yield


if __name__ == "__main__":
    sys.exit(main())
