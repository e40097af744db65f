"""Bring a job to other hosts over OpenSSH: the user's own ``ssh`` and its configuration."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain.errors import UsageError
from mtrain.spec.hostnames import checked_host, checked_user
from mtrain.spec.model import Port
from mtrain.spec.pathnames import PathText
from mtrain.spec.section import Positive, Section
from mtrain.system.quoting import remote_command

if TYPE_CHECKING:
    from mtrain.jobs.hosts.agent_processes import AgentProcesses

ALIVE_S = 15
"""Seconds between two keep-alive requests of ssh to a silent server. They come second: mtrain's heartbeat decides."""


def _is_user(text: str) -> str:
    try:
        return checked_user(text)
    except UsageError as error:
        raise ValueError(f"given {error}") from None


class Ssh(Cluster):
    """Starts an agent on every host over ssh.

    The agent receives the job over that connection, so nothing of a spec is ever in a command line. ssh never asks for
    a password, or whether an unknown host key is right, because nobody may be there to answer.
    """

    class Options(Section):
        """How hosts are reached, given in the spec as ``cluster.options``."""

        port: Port | None = Field(default=None, description="null: as ssh has it")
        user: Annotated[str, AfterValidator(_is_user)] | None = Field(default=None, description="null: as ssh has it")
        identity_file: PathText | None = Field(default=None, description="private key; null: as ssh has it")
        python: PathText | None = Field(
            default=None,
            description="interpreter on the hosts that has mtrain; null: the path of the one that runs mtrain here",
        )
        connect_timeout_s: Positive = Field(default=8, description="seconds for a host to answer")

    def __init__(self, options: Options) -> None:
        self.options = options

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
