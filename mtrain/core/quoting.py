"""Host names and commands made safe for ``ssh``: the one place where a command becomes text for a shell.

``ssh`` joins what it is given with spaces and hands the result to the login shell of the other host. So a command is sent
as one word that this module made: POSIX shells (dash, bash, zsh, ksh, busybox) and fish read it back as exactly the given
arguments and variables. The quoting uses no construct that they read differently: inside single quotes a backslash is
special to fish, so quotes and backslashes stand outside, each behind a backslash of its own.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence

from mtrain.core.errors import UsageError

LONGEST_BYTES = 100_000
"""Of a command: Linux takes 128 KiB in one argument, and the login shell is given all of it in one."""
LONGEST_HOST = 253
"""Characters of a host name, RFC 1035 section 2.3.4."""
BROADCAST = "255.255.255.255"
LONGEST_USER = 32
"""Characters of a login name, as Linux's own tools have it."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+-]+")
"""Words that no shell changes. Not ``=`` (zsh), ``~``, ``%`` (fish), ``{`` and all the others."""
_OUTSIDE = re.compile(r"(['\\])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBERS = re.compile(r"[0-9.]+")
"""No name: the system's look-up would take 1 for 0.0.0.1."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


def remote_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """The one argument for ``ssh HOST`` that runs ``argv`` there, with ``env`` over the environment of the login.

    It replaces the login shell (``exec``), so that a signal to it reaches the command itself.

    Raises:
        UsageError: nothing to run; a program that begins with "-"; a variable whose name is none; a NUL character or
            a lone surrogate anywhere; more than ``LONGEST_BYTES``.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise UsageError(
            f"a command for another host: given {list(argv[:1])!r}, expected the name or path of a program"
        )
    words = ["exec"]
    if env:
        for name in env:
            if not _NAME.fullmatch(name):
                raise UsageError(f"environment variable {name!r}: expected letters, digits and _ for a name")
        words += ["env", *(f"{name}={_word(value, f'the value of {name}')}" for name, value in env.items())]
        if "=" in argv[0]:  # env would read it as one more variable
            words += ["/bin/sh", "-c", "'exec \"$@\"'", "sh"]
    words += [_word(word, f"argument {i} of a command") for i, word in enumerate(argv)]
    line = " ".join(words)
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > LONGEST_BYTES:
        raise UsageError(
            f"a command for another host has {size} bytes, more than a login shell takes ({LONGEST_BYTES})"
        )
    return line


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


def _word(text: str, what: str) -> str:
    """``text`` as one word of a shell."""
    if "\0" in text:
        raise UsageError(f"{what}: holds a NUL character, which no program can be given: {text[:80]!r}")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{what}: holds a character that is no text: {text[:80]!r}") from None
    if _PLAIN.fullmatch(text):
        return text
    parts = (f"\\{part}" if part in "'\\" else f"'{part}'" for part in _OUTSIDE.split(text) if part)
    return "".join(parts) or "''"
