"""Bring the commands of a job to other hosts over OpenSSH: the user's own ``ssh`` and its configuration."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.spec.hostnames import checked_host, checked_user
from mtrain.system.placement import CarryOptions
from mtrain.system.quoting import remote_command

ALIVE_S = 15
"""Seconds between two keep-alive requests of ssh to a silent server. They come second: mtrain's heartbeat decides."""
AGENT = ("-m", "mtrain.cluster.agent")


class Ssh:
    """Starts an agent on every host over ssh.

    The agent receives the job over that connection, so nothing of a spec is ever in a command line. ssh never asks for
    a password, or whether an unknown host key is right, because nobody may be there to answer.
    """

    class Options(CarryOptions):
        """Nothing beyond what every carrier takes."""

    carries: ClassVar[bool] = True
    starts: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def bring(self, host: str, node: int) -> Sequence[str]:
        """Return the ssh command that starts the agent on ``host``.

        Raises:
            UsageError: ``host`` is no name or address of a host, or the interpreter's path cannot be quoted for a
                shell.
        """
        options = self.options
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(options.connect_timeout_s),
            "ServerAliveInterval": str(ALIVE_S),
            "ServerAliveCountMax": str(max(3, -(-2 * options.failure_timeout_s // ALIVE_S))),
            "ClearAllForwardings": "yes",
        }
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        words += ["-p", str(options.port)] if options.port is not None else []
        words += ["-l", checked_user(options.user)] if options.user is not None else []
        words += ["-i", options.identity_file] if options.identity_file is not None else []
        return ("ssh", "-T", *words, "--", checked_host(host), remote_command([options.python, *AGENT]))
