"""torch's TCPStore, in which ranks find each other, listening at one address instead of on every interface."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from mtrain.system import placement


def listening_store(address: str, port: int, *, size: int, timeout: timedelta) -> TCPStore | None:
    """A store that listens at ``address`` and ``port`` alone, for ``size`` clients that connect from elsewhere.

    None where ``address`` is not one of this machine, as behind a router that translates addresses: then the caller has to
    let torch listen on every interface.

    Raises:
        OSError: the port is taken.
    """
    own = next((each for each in placement.resolve(address) if placement.is_own(each)), None)
    if own is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own, port))
        return TCPStore(
            own,
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
