"""Run the web page over a folder of runs until it is ended."""

import socket
from collections.abc import Callable
from pathlib import Path

from mtrain.errors import UsageError
from mtrain.pages.folder import Runs

LOOPBACK = ("127.", "::1", "localhost")
MISSING = "mtrain ui needs starlette and uvicorn, which are not installed; install them with pip install 'mtrain[ui]'"


def serve(folder: Path, *, host: str, port: int, tell: Callable[[str], object]) -> None:
    """Serve the pages of the runs in ``folder`` until Ctrl-C or SIGTERM.

    Args:
        folder: The folder of runs.
        host: Name or address to listen on.
        port: Port to listen on; 0: one that is free.
        tell: Receives the address of the page, and a warning where other hosts can reach it.

    Raises:
        UsageError: there is no such folder, the port is taken, or the libraries are not installed.
    """
    runs = Runs(folder)
    try:
        import uvicorn

        from mtrain.pages.app import application
    except ImportError as error:
        raise UsageError(MISSING) from error
    with _listening(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        tell(f"runs in {folder}: http://{shown}:{listener.getsockname()[1]}/  (Ctrl-C ends it)")
        if not host.startswith(LOOPBACK):
            tell(f"warning: --host {host}: whoever reaches this port reads every run in {folder}; there is no password")
        config = uvicorn.Config(
            application(runs, host=host),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
            limit_concurrency=100,
        )
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has ended; it passes Ctrl-C on
            return


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
