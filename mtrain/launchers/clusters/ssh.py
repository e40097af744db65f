"""Bring a job to other hosts over OpenSSH: the user's own ``ssh`` and its configuration."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain.errors import UsageError
from mtrain.spec.hostnames import checked_host, checked_user
from mtrain.spec.model import Port
from mtrain.spec.pathnames import PathText
from mtrain.spec.section import Positive, Section, as_validator

if TYPE_CHECKING:
    from mtrain.jobs.hosts.agent_processes import AgentProcesses

ALIVE_S = 15
"""Seconds between two keep-alive requests of ssh to a silent server. They come second: mtrain's heartbeat decides."""


class Ssh(Cluster):
    """Starts an agent on every host over ssh.

    The agent receives the job over that connection, so nothing of a spec is ever in a command line. ssh never asks for
    a password, or whether an unknown host key is right, because nobody may be there to answer.
    """

    class Options(Section):
        """How hosts are reached, given in the spec as ``cluster.options``."""

        port: Port | None = Field(default=None, description="null: as ssh has it")
        user: Annotated[str, AfterValidator(as_validator(checked_user))] | None = Field(
            default=None, description="null: as ssh has it"
        )
        identity_file: PathText | None = Field(default=None, description="private key; null: as ssh has it")
        python: PathText | None = Field(
            default=None,
            description="interpreter on the hosts that has mtrain; null: the path of the one that runs mtrain here",
        )
        connect_timeout_s: Positive = Field(default=8, description="seconds for a host to answer")

    options: Options

    @property
    def python(self) -> str | None:
        """Return the option ``python``."""
        return self.options.python

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the ssh command that starts the agent on host number ``node``.

        Raises:
            UsageError: the host is no name or address of a host, or the interpreter's path cannot be quoted for a
                shell.
        """
        options = self.options
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(options.connect_timeout_s),
            "ServerAliveInterval": str(ALIVE_S),
            "ServerAliveCountMax": str(max(3, -(-2 * job.failure_timeout_s // ALIVE_S))),
            "ClearAllForwardings": "yes",
        }
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        words += ["-p", str(options.port)] if options.port is not None else []
        words += ["-l", checked_user(options.user)] if options.user is not None else []
        words += ["-i", options.identity_file] if options.identity_file is not None else []
        return ("ssh", "-T", *words, "--", checked_host(job.hosts[node]), remote_command(job.agent))

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> "AgentProcesses":
        """Return agents over ssh; the agent of a host that is this machine is started without ssh."""
        from mtrain.jobs.hosts.agent_processes import AgentProcesses
        from mtrain.jobs.hosts.start_failures import SSH

        commands = [self.command(node, job) for node in range(len(job.hosts))]
        return AgentProcesses(job, commands, environ=environ, means=SSH, directly_here=True)


# ``ssh`` joins its arguments with spaces and passes the result to the login shell of the other host. So a command is sent
# as one argument that this module makes: POSIX shells (dash, bash, zsh, ksh, busybox) and fish read it back as exactly
# the given arguments and variables. The quoting uses no construct that they read differently: inside single quotes a
# backslash is special to fish, so quotes and backslashes stand outside the quotes, each after a backslash of its own.
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
