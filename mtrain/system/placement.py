"""This machine's addresses, devices and ports, and the options that a plan passes to every launcher."""

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import UsageError
from mtrain.system.environment import TUNABLES

if TYPE_CHECKING:
    from mtrain.system.launch_options import LaunchOptions

LOOPBACK = "127.0.0.1"
LOOPBACK_6 = "::1"
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Holds the time that the control group of a container may use in each period, both in microseconds, or "max"."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Lets malloc of glibc 2.35 and newer ask for huge pages, where the kernel gives them on request; others ignore it."""
QUIET_PORTS = range(20000, 32768)
"""Ports below those that Linux gives to outgoing connections (``ip_local_port_range``, 32768 to 60999 by default)."""
_ROW, _ATTEMPTS = 16, 64
"""Ports in a row that ``free_port`` asks for, and how many rows it tries."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables in which gloo and NCCL look for the network interface to use."""


def rank_environment(options: "LaunchOptions") -> dict[str, str]:
    """Return the environment variables that every rank needs, whichever launcher starts it."""
    threads = str(options.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # OpenMP threads that spin while they wait multiply the CPU time by five where ranks share cores.
    env = dict.fromkeys(names, threads) | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    # With huge pages, the same memory needs 512 times fewer entries in the processor's page tables. The caller's own settings
    # are added to this one (``environment.join_variables``).
    env |= {TUNABLES: HUGE_PAGES}
    if options.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in options.devices)
    if options.interface is not None:
        env |= dict.fromkeys(INTERFACE_VARIABLES, options.interface)
    return env


def run_dir_in(argv: Sequence[str]) -> Path | None:
    """Return the run folder that the arguments of a rank name; None: they name none."""
    words = list(argv)
    return Path(words[words.index("--run-dir") + 1]) if "--run-dir" in words else None


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port of ``address`` that nothing uses at the moment, nor the few ports behind it.

    Raises:
        OSError: ``address`` is not one of this machine.
    """
    # It lies below the ports that systems give to outgoing connections, one of which could take it before the ranks listen
    # there. If all those tried are in use, the system chooses.
    for _ in range(_ATTEMPTS):
        port = QUIET_PORTS.start + secrets.randbelow(len(QUIET_PORTS) - _ROW)
        if all(_is_free(address, port + following) for following in range(_ROW)):
            return port
    return _bound_port(address, 0)


def _is_free(address: str, port: int) -> bool:
    try:
        _bound_port(address, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        return False
    return True


def _bound_port(address: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, port))
        return int(listener.getsockname()[1])


def listen_at(address: str, port: int, *, backlog: int = 1) -> socket.socket:
    """Return a socket that listens at an address of this machine; at port 0, on one that the system chooses.

    Raises:
        OSError: it cannot.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Without SO_REUSEADDR a port would count as taken for a while after a job that used it has ended (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def check_port(address: str, port: int) -> None:
    """Refuse a rendezvous port on which another program listens. An address of another machine cannot be checked.

    Raises:
        UsageError: the port is in use.
    """
    try:
        listen_at(address, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"cluster.master_port: {port} is in use on {address}; give another one, or end what listens there"
            ) from error


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of every IPv4 and IPv6 address of this machine."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, address.address.split("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in families
    ]


def is_own(address: str) -> bool:
    """Return whether a server on this machine can listen at ``address``."""
    try:
        _bound_port(address, 0)
    except OSError:
        return False
    return True


def is_here(host: str) -> bool:
    """Return whether a host of a job is this machine."""
    return any(is_own(address) for address in (host, *resolve(host)))


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback IP address, which every machine has for itself."""
    return is_address(address) and ipaddress.ip_address(address).is_loopback


def is_link_local(address: str) -> bool:
    """Return whether ``address`` is an IP address that is valid on one link only, such as 169.254.0.1."""
    return is_address(address) and ipaddress.ip_address(address).is_link_local


def loopback_like(address: str) -> str:
    """Return the loopback address of the same IP version as ``address``; for a host name, that of IPv4."""
    return LOOPBACK_6 if is_address(address) and ":" in address else LOOPBACK


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name, empty if it cannot be resolved. An IP address resolves to itself."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def find_node_rank(
    ips: Sequence[str],
    addresses: Sequence[tuple[str, str]],
    *,
    node_rank: int | None = None,
    resolver: Callable[[str], Sequence[str]] = resolve,
) -> int:
    """Return the index of this machine in ``ips``. ``node_rank``, from ``--node-rank``, overrides the search.

    Raises:
        UsageError: none or several of ``ips`` are addresses of this machine, or ``node_rank`` is out of range. Starting
            anyway would make this machine a second rank 0, and every host would wait for ever.
    """
    if node_rank is not None:
        if node_rank >= len(ips):
            raise UsageError(
                f"--node-rank {node_rank}: expected 0 to {len(ips) - 1}, there are {len(ips)} hosts: {', '.join(ips)}"
            )
        return node_rank
    mine = {address for _, address in addresses}
    matches = [i for i, host in enumerate(ips) if host in mine or mine.intersection(resolver(host))]
    if len(matches) == 1:
        return matches[0]
    own = ", ".join(f"{address} ({name})" for name, address in addresses) or "none"
    problem = "is not among them" if not matches else "is several of them (" + ", ".join(ips[i] for i in matches) + ")"
    raise UsageError(
        f"--ips {','.join(ips)}: this machine {problem}; its addresses are {own}. "
        "Correct --ips, or say which host this is with --node-rank N"
    )


def line_for(line: Sequence[str], node: int, *, cluster: str = "") -> list[str]:
    """Return the command to type on host ``node``, derived from the ``line`` that was typed on one of the hosts.

    ``cluster``: name of the cluster that the line chooses, by ``--cluster`` or its spec, and that is replaced by
    ``auto``, because this line is typed on every host; empty: the line chooses none.
    """
    rest: list[str] = []
    words = iter(line)
    for word in words:
        name, sign, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag not in ("--cluster", "--node-rank"):
            rest.append(word)
            continue
        value = value if sign else next(words, "")
        if flag == "--cluster" and not cluster:
            rest += [word] if sign else [word, value]
    return [*rest, *(("--cluster", "auto") if cluster else ()), "--node-rank", str(node)]


def interface_of(addresses: Sequence[tuple[str, str]], candidates: Sequence[str]) -> str | None:
    """Return the name of the first interface that has one of the addresses ``candidates``; None if none does."""
    return next((name for name, address in addresses if address in candidates), None)


def count_devices(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> int:
    """Return how many accelerators a rank on this machine would see; 0 without any. No framework is imported."""
    installed = sum(1 for path in dev.glob("nvidia[0-9]*"))
    visible = _listed_devices(environ)
    return installed if visible is None else min(installed, len(visible))


def hides_devices(environ: Mapping[str, str]) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` is set and lists no device."""
    return _listed_devices(environ) == []


def _listed_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; None if it is not set, so that all devices are visible."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [part for part in visible.split(",") if part.strip() not in ("", "-1")]


def usable_cores(*, quota: Path = QUOTA) -> int:
    """Return the number of CPU cores that this process may use, at least one.

    In a container, ``quota`` limits its time, although all cores of the machine are seen there.
    """
    granted = granted_cores(quota)
    return visible_cores() if granted is None else max(1, min(visible_cores(), int(granted)))


def visible_cores() -> int:
    """Return the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cores(quota: Path = QUOTA) -> float | None:
    """Return how many cores' worth of time the control group grants; None: no limit."""
    try:
        most, period = quota.read_text(encoding="ascii").split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
