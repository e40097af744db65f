"""Host and login names that can only be names: ``ssh`` and the shells that it starts would read others as options or code."""

import ipaddress
import re

from mtrain.errors import UsageError

LONGEST_HOST = 253
"""Characters of a host name, RFC 1035 section 2.3.4."""
BROADCAST = "255.255.255.255"
LONGEST_USER = 32
"""Characters of a login name, as Linux's own tools have it."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBERS = re.compile(r"[0-9.]+")
"""No name: the system's look-up would take 1 for 0.0.0.1."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


def checked_host(host: str) -> str:
    """``host`` itself, if it can only be one host: a name of ASCII letters, digits, ".", "-" and "_", or its IP address.

    ``ssh`` would read "-oProxyCommand=..." as an option, and puts names into commands of the user's own configuration
    (``ProxyCommand``, ``Match exec``), where other characters would be the shell's.

    Raises:
        UsageError: it is anything else.
    """
    is_name = _HOST.fullmatch(host) and not _NUMBERS.fullmatch(host)
    if len(host) <= LONGEST_HOST and (is_name or _is_address(host)):
        return host
    shown = repr(host if len(host) <= LONGEST_HOST else f"{host[:40]}...")
    why = " (it would be read as an option of ssh)" if host.startswith("-") else ""
    expected = 'a name of ASCII letters, digits, ".", "-" and "_", or the IP address of one host'
    raise UsageError(f"host {shown}{why}: expected {expected}; a jump host goes into ~/.ssh/config")


def checked_user(user: str) -> str:
    """``user`` itself, if it can only be a login name: ASCII letters, digits, ".", "-" and "_", no "-" in front.

    Raises:
        UsageError: it is anything else.
    """
    if len(user) <= LONGEST_USER and _HOST.fullmatch(user):
        return user
    raise UsageError(f'login name {user[:40]!r}: expected ASCII letters, digits, ".", "-" and "_", no "-" in front')


def _is_address(host: str) -> bool:
    address, percent, zone = host.partition("%")
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.is_unspecified or found.is_multicast or address == BROADCAST:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None
