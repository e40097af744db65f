"""horovodrun for one host, with a rendezvous on the loopback interface only. It takes the arguments of horovodrun.

``python -m mtrain.backends._horovod.single_host_starter -np 2 ...`` does what ``python -m horovod.runner.launch -np 2
...`` does. horovodrun's own rendezvous would listen on every interface of the machine and, having no password, answer
anyone.
"""

import socketserver
from typing import Any

from horovod.runner import launch
from horovod.runner.http.http_server import RendezvousHTTPServer

from mtrain.system.placement import LOOPBACK


def _bind(server: Any) -> None:
    """Bind the server to the loopback address; horovodrun passes the empty address, which means every interface."""
    server.server_address = (LOOPBACK, server.server_address[1])
    socketserver.TCPServer.server_bind(server)  # HTTPServer.server_bind would ask the DNS for the address's name


def main() -> None:
    """Run horovodrun."""
    # Horovod 0.28 has no option for the address, so its server class is changed.
    RendezvousHTTPServer.server_bind = _bind
    launch.run_commandline()


if __name__ == "__main__":
    main()
