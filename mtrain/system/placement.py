"""Where ranks run: this machine's addresses, devices and ports, and the options that every launcher is given."""

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mtrain.errors import UsageError

LOOPBACK = "127.0.0.1"
LOOPBACK_6 = "::1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where the collectives of both frameworks look for the interface that they use."""


class LaunchOptions(BaseModel):
    """What a plan hands to a launcher; a launcher's own ``Options`` extends it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = Field(description="interpreter of the ranks")
    master_addr: str = Field(LOOPBACK, description="address of the first host")
    master_port: int = Field(29500, gt=0, lt=65536, description="rendezvous port on the first host")
    start_port: int | None = Field(None, gt=0, lt=65536, description="first port of the ranks; null: theirs to choose")
    threads: int = Field(1, gt=0, description="CPU threads per rank")
    devices: tuple[int, ...] | None = Field(None, description="device numbers on every host, () for the CPU; null: all")
    interface: str | None = Field(None, description="network interface of the collectives; null: left to them")


class CarryOptions(BaseModel):
    """What a plan hands to what brings commands to several hosts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = Field(description="interpreter on the hosts that has mtrain")
    line: tuple[str, ...] = Field((), description="the command that was typed here")
    port: int | None = Field(None, gt=0, lt=65536, description="of the ssh servers; null: as ssh has it")
    user: str | None = Field(None, description="login; null: as ssh has it")
    identity_file: str | None = Field(None, description="private key; null: as ssh has it")
    connect_timeout_s: int = Field(8, gt=0, description="seconds for a host to answer")
    failure_timeout_s: int = Field(60, gt=0, description="seconds of silence that end a job")


def rank_environment(options: LaunchOptions) -> dict[str, str]:
    """Variables that every rank needs whoever starts it.

    A spinning OpenMP wait multiplies CPU time by five where ranks share cores, hence ``OMP_WAIT_POLICY``.
    """
    threads = str(options.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = dict.fromkeys(names, threads) | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    if options.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in options.devices)
    if options.interface is not None:
        env |= dict.fromkeys(INTERFACE_VARIABLES, options.interface)
    return env


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port that nothing listens on at ``address`` just now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def check_port(address: str, port: int) -> None:
    """Refuse a rendezvous port that another program listens on; an address of another machine is not looked at.

    Raises:
        UsageError: it is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a job has just left is free
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"cluster.master_port: {port} is in use on {address}; give another one, or end what listens there"
                ) from error


def own_addresses() -> list[tuple[str, str]]:
    """(interface, address) of every IPv4 and IPv6 address of this machine."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, address.address.split("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in families
    ]


def is_own(address: str) -> bool:
    """Whether a server on this machine can listen at ``address``."""
    try:
        free_port(address)
    except OSError:
        return False
    return True


def is_address(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an IP address leads to no other machine than the one that uses it."""
    return is_address(address) and ipaddress.ip_address(address).is_loopback


def loopback_like(address: str) -> str:
    """The loopback address of the same version of IP; of a name, that of version 4."""
    return LOOPBACK_6 if is_address(address) and ":" in address else LOOPBACK


def bracketed(host: str) -> str:
    """``host``, an IPv6 address in brackets, so that a number can stand behind it."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def resolve(host: str) -> list[str]:
    """Addresses of a host name; an address is its own answer; empty when the name is not known."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def find_node_rank(
    ips: Sequence[str],
    addresses: Sequence[tuple[str, str]],
    *,
    given: int | None = None,
    resolver: Callable[[str], Sequence[str]] = resolve,
) -> int:
    """This machine's place in ``ips``.

    Raises:
        UsageError: none or several of ``ips`` are addresses of this machine, or ``given`` is out of range. Starting
            anyway would make this machine a second rank 0, and every host would wait for ever.
    """
    if given is not None:
        if given >= len(ips):
            raise UsageError(
                f"--node-rank {given}: expected 0 to {len(ips) - 1}, there are {len(ips)} hosts: {', '.join(ips)}"
            )
        return given
    mine = {address for _, address in addresses}
    matches = [i for i, host in enumerate(ips) if host in mine or mine.intersection(resolver(host))]
    if len(matches) == 1:
        return matches[0]
    own = ", ".join(f"{address} ({name})" for name, address in addresses) or "none"
    found = "is not among them" if not matches else "is several of them (" + ", ".join(ips[i] for i in matches) + ")"
    raise UsageError(
        f"--ips {','.join(ips)}: this machine {found}; its addresses are {own}. "
        "Correct --ips, or say which host this is with --node-rank N"
    )


def line_for(line: Sequence[str], node: int, *, carried: bool) -> list[str]:
    """The command ``line``, as it was typed on one host, for host ``node`` of a job that is started by hand on each.

    ``carried``: its launcher was to bring it there, so ``auto`` takes its place; else all hosts must be told the same one.
    """
    own = ("--launcher", "--node-rank") if carried else ("--node-rank",)
    kept: list[str] = []
    words = iter(line)
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag not in own:
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return [*kept, *(("--launcher", "auto") if carried else ()), "--node-rank", str(node)]


def interface_of(addresses: Sequence[tuple[str, str]], wanted: Sequence[str]) -> str | None:
    """The interface that owns one of the ``wanted`` addresses; None when none does."""
    return next((name for name, address in addresses if address in wanted), None)


def count_devices(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> int:
    """Accelerators that a rank here would see, found without a framework; 0 on a CPU machine."""
    present = sum(1 for path in dev.glob("nvidia[0-9]*"))
    listed = _listed_devices(environ)
    return present if listed is None else min(present, len(listed))


def hides_devices(environ: Mapping[str, str]) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` lists no device."""
    return _listed_devices(environ) == []


def _listed_devices(environ: Mapping[str, str]) -> list[str] | None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [part for part in visible.split(",") if part.strip() not in ("", "-1")]


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
