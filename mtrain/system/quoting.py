"""Quote commands for ``ssh``. No other module turns a command into text for a shell to run.

``ssh`` joins its arguments with spaces and passes the result to the login shell of the other host. So a command is sent
as one argument that this module makes: POSIX shells (dash, bash, zsh, ksh, busybox) and fish read it back as exactly
the given arguments and variables. The quoting uses no construct that they read differently: inside single quotes a
backslash is special to fish, so quotes and backslashes stand outside the quotes, each after a backslash of its own.
"""

import re
from collections.abc import Mapping, Sequence

from mtrain.errors import UsageError

LONGEST_BYTES = 100_000
"""Largest size of a command. Linux allows 128 KiB in one argument, and the login shell gets the command as one."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+-]+")
"""Words that no shell changes, and that need no quotes. ``=`` (zsh), ``~``, ``%`` (fish) and ``{`` are not among
them."""
_OUTSIDE = re.compile(r"(['\\])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def remote_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return the argument for ``ssh HOST`` that runs ``argv`` there, with ``env`` added to the environment there.

    The command replaces the login shell (``exec``), so that a signal to the shell reaches the command itself.

    Raises:
        UsageError: ``argv`` is empty; the program begins with "-"; the name of a variable is not valid; there is a NUL
            character or a lone surrogate; the result is longer than ``LONGEST_BYTES``.
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
        if "=" in argv[0]:  # `env` would read the program's name as one more variable.
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
    """Quote ``text`` as one word of a shell command. ``what`` names it in errors."""
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
