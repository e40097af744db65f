"""Make the TCPStore through which torch's ranks find each other listen at one address instead of on every interface."""

import socket
from datetime import timedelta

from mtrain.backends._torch import internals
from mtrain.system import placement


def listening_store(address: str, port: int, *, size: int, timeout: timedelta) -> internals.TCPStore | None:
    """Make a store that listens only at ``address`` and ``port``, for ``size`` clients.

    Returns:
        The store, or None if ``address`` is not an address of this machine (for example with a router in between that
        translates addresses). The caller then has to let torch listen on every interface.

    Raises:
        OSError: The port is in use.
    """
    own = next((each for each in placement.resolve(address) if placement.is_own(each)), None)
    if own is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own, port))
        return internals.store_at(listener, own, port, size=size, timeout=timeout)
