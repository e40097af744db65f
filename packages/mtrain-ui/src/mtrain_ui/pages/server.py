"""Run the web page over a folder of runs until it is ended."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain_ui.pages.folder import Runs

LOOPBACK = ("127.", "::1", "localhost")
MAX_CONNECTIONS = 100
"""Connections that may be open at once; further ones take the place of idle ones."""
NEEDED = ("starlette", "uvicorn", "jinja2")


def serve(folder: Path, *, host: str, port: int, tell: Callable[[str], object]) -> None:
    """Serve the pages of the runs in ``folder`` until Ctrl-C or SIGTERM, which both end it as usual: exit code 0.

    Args:
        folder: The folder of runs.
        host: Name or address to listen on.
        port: Port to listen on; 0: one that is free.
        tell: Receives the address of the page, and a warning where other hosts can reach it.

    Raises:
        UsageError: there is no such folder, the port is taken, or the libraries are not installed.
    """
    runs = Runs(folder)
    remedies.require(NEEDED, what="mtrain ui", extra="mtrain-ui")
    import uvicorn

    from mtrain.system.http_connections import Limits, protocol
    from mtrain_ui.pages.app import application

    with _listening(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        tell(f"runs in {folder}: http://{shown}:{listener.getsockname()[1]}/  (Ctrl-C ends it)")
        if not host.startswith(LOOPBACK):
            tell(f"warning: --host {host}: whoever reaches this port reads every run in {folder}; there is no password")
        config = uvicorn.Config(
            application(runs, host=host),
            http=protocol(Limits(connections=MAX_CONNECTIONS)),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )

        class Server(uvicorn.Server):
            """Ends without raising the signal again: being asked to end is the usual end of a server."""

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                self.force_exit = self.should_exit
                self.should_exit = True

        Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UsageError: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such name"
        raise UsageError(f"--host {host}: {reason}; give an address of this host, such as 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; give another port, or --port 0 for one that is free"
        ) from error
    return listener
