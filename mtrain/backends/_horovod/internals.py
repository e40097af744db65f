"""Everything that mtrain uses of Horovod without a promise of Horovod: private names, and changes of its behaviour.

``tests/backends/test_torch_horovod_internals.py`` checks each of them. Importing this module imports nothing of Horovod.
"""

import socketserver
from collections.abc import Mapping
from typing import Any

from mtrain.system.placement import LOOPBACK

TESTED = ("0.28.1",)
"""Versions of Horovod with which these internals were tested; see docs/versions.md."""


def missing_passes(optimizer: Any) -> Mapping[Any, int]:
    """Return how many backward passes a ``hvd.DistributedOptimizer`` still expects of each parameter in this update."""
    # Horovod sends a gradient when its hook has run that often, and has no public way to send one that takes no part.
    counts: Mapping[Any, int] = optimizer._allreduce_delay
    return counts


def listen_on_loopback_only() -> None:
    """Make horovodrun's rendezvous in this process listen on the loopback interface only."""
    # Horovod has no option for the address: its server listens on every interface and, having no password, answers
    # anyone. horovodrun makes the server itself, so its class is changed.
    from horovod.runner.http.http_server import RendezvousHTTPServer

    RendezvousHTTPServer.server_bind = _bind_to_loopback


def leave_checks_to_ranks() -> None:
    """Make horovodrun start ranks without asking whether Horovod was built with gloo; they ask it themselves."""
    # horovodrun imports torch in a further process to find that out, as long as a rank takes to start.
    from horovod.runner import launch

    launch.gloo_built = lambda verbose=False: True


def _bind_to_loopback(server: Any) -> None:
    """Bind the server to the loopback address; horovodrun passes the empty address, which means every interface."""
    server.server_address = (LOOPBACK, server.server_address[1])
    socketserver.TCPServer.server_bind(server)  # HTTPServer.server_bind would ask the DNS for the address's name


def rendezvous_server(address: tuple[str, int]) -> Any:
    """Make Horovod's rendezvous server listen at ``address``; its ``init`` takes the ranks.

    Raises:
        OSError: The port is in use, or the address does not belong to this host.
    """
    # Horovod makes this server only within horovodrun, and at every interface.
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind would ask the DNS for the address's name

    return Server(address, RendezvousHandler, verbose=0)
