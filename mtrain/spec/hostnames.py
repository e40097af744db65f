"""Check host and login names, so that ``ssh`` and the shells that it starts cannot read them as options or code."""

import ipaddress
import re
from collections.abc import Collection, Sequence

from mtrain.errors import UsageError

LONGEST_HOST = 253
"""Largest length of a host name in characters: RFC 1035, section 2.3.4."""
BROADCAST = "255.255.255.255"
LONGEST_USER = 32
"""Largest length of a login name in characters, the limit of Linux's own tools."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBERS = re.compile(r"[0-9.]+")
"""Digits and dots alone are refused as a host name, because the system's name lookup would read "1" as 0.0.0.1."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


FEW = 8
"""Most hosts that a message names."""


def few(hosts: Sequence[str]) -> str:
    """Return hosts for a message: all of a few, else the first ones and how many there are."""
    if len(hosts) <= FEW:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:FEW])} ... ({len(hosts):,} hosts)"


def checked_host(host: str) -> str:
    """Return ``host`` if it is safe: a name of ASCII letters, digits, ".", "-" and "_", or the IP address of one host.

    Raises:
        UsageError: ``host`` is anything else.
    """
    # ``ssh`` would read "-oProxyCommand=..." as an option, and puts names into commands of the user's
    # own configuration (``ProxyCommand``, ``Match exec``), where other characters would be the shell's.
    is_name = _HOST.fullmatch(host) and not _NUMBERS.fullmatch(host)
    if len(host) <= LONGEST_HOST and (is_name or _is_address(host)):
        return host
    shown = repr(host if len(host) <= LONGEST_HOST else f"{host[:40]}...")
    why = " (it would be read as an option of ssh)" if host.startswith("-") else ""
    expected = 'a name of ASCII letters, digits, ".", "-" and "_", or the IP address of one host'
    raise UsageError(f"host {shown}{why}: expected {expected}; a jump host goes into ~/.ssh/config")


def checked_user(user: str) -> str:
    """Return ``user`` if it is a safe login name: ASCII letters, digits, ".", "-" and "_", without a leading "-".

    Raises:
        UsageError: ``user`` is anything else.
    """
    if len(user) <= LONGEST_USER and _HOST.fullmatch(user):
        return user
    raise UsageError(f'login name {user[:40]!r}: expected ASCII letters, digits, ".", "-" and "_", no "-" in front')


def _is_address(host: str) -> bool:
    address, percent, zone = host.partition("%")
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    # None of these is the address of one host.
    if parsed.is_unspecified or parsed.is_multicast or address == BROADCAST:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def checked_listener(address: str) -> str:
    """Return ``address`` if a server can be told to listen there: an IP address, or ``host`` for that of the host in the job.

    Raises:
        UsageError: ``address`` is anything else.
    """
    if address == "host":
        return address
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise UsageError(
            f"address {address[:LONGEST_HOST]!r}: expected an IP address of the host, such as 127.0.0.1, 0.0.0.0 for all of "
            "them, or `host` for the address that the host has in the job"
        ) from error


def bracket_host(host: str) -> str:
    """Return ``host``, in brackets if it is an IPv6 address, so that ``:NUMBER`` can be appended."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def is_named(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an address, which nobody can redirect, or one of ``names``."""
    # A page of a stranger can make a browser ask a server by a name of its own (DNS
    # rebinding), and would then read the answers. Such a request carries that name.
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.lower().rstrip(".")
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name in {each.lower().rstrip(".") for each in names}
    return True
