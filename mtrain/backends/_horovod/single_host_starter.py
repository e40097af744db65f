"""horovodrun for one host, with a rendezvous that listens on the loopback interface alone; arguments are those of horovodrun.

``python -m mtrain.backends._horovod.single_host_starter -np 2 ...`` is
``python -m horovod.runner.launch -np 2 ...``, whose rendezvous would listen on
every interface of the machine, and answer whoever connects to it: it has no password.
"""

import socketserver
from typing import Any

from horovod.runner import launch
from horovod.runner.http.http_server import RendezvousHTTPServer

from mtrain.system.placement import LOOPBACK


def _bind(server: Any) -> None:
    """Bind where ranks on this host look for it; horovodrun asks for the empty address, which means all of them."""
    server.server_address = (LOOPBACK, server.server_address[1])
    socketserver.TCPServer.server_bind(server)  # HTTPServer's own asks the DNS for the name of the address


def main() -> None:
    """Run horovodrun. Seen with Horovod 0.28."""
    RendezvousHTTPServer.server_bind = _bind
    launch.run_commandline()


if __name__ == "__main__":
    main()
