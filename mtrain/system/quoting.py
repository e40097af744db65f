"""Commands made safe for ``ssh``: the one place where a command becomes text for a shell.

``ssh`` joins what it is given with spaces and hands the result to the login shell of the other host. So a command is sent
as one word that this module made: POSIX shells (dash, bash, zsh, ksh, busybox) and fish read it back as exactly the given
arguments and variables. The quoting uses no construct that they read differently: inside single quotes a backslash is
special to fish, so quotes and backslashes stand outside, each after a backslash of its own.
"""

import re
from collections.abc import Mapping, Sequence

from mtrain.errors import UsageError

LONGEST_BYTES = 100_000
"""Of a command: Linux takes 128 KiB in one argument, and the login shell is given all of it in one."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+-]+")
"""Words that no shell changes. Not ``=`` (zsh), ``~``, ``%`` (fish), ``{`` and all the others."""
_OUTSIDE = re.compile(r"(['\\])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
