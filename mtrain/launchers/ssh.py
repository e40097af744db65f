"""The commands of a job brought to other hosts over OpenSSH: the user's own ``ssh``, with the user's own configuration."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.spec.hostnames import checked_host, checked_user
from mtrain.system.placement import CarryOptions
from mtrain.system.quoting import remote_command

ALIVE_S = 15
"""Between two questions of ssh to a server that says nothing. Our own heartbeat is what counts."""
AGENT = ("-m", "mtrain.cluster.agent")


class Ssh:
    """Starts an agent on every host, which is told over the connection what to run: nothing of a spec is ever in a command line.

    Never asks for a password or the key of a host that is not known yet: nobody may be there to answer.
    """

    class Options(CarryOptions):
        """Nothing beyond what every carrier takes."""

    carries: ClassVar[bool] = True
    starts: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def bring(self, host: str, node: int) -> Sequence[str]:
        """One ssh for ``host``.

        Raises:
            UsageError: ``host`` is no name or address of a host, or the interpreter cannot be named to a shell.
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
