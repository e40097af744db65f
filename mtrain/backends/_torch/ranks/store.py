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
    listener = bound(address, port)
    if listener is None:
        return None
    with listener:
        return store_on(listener, size=size, timeout=timeout)


def bound(address: str, port: int) -> socket.socket | None:
    """Bind the socket of a store; see ``listening_store``."""
    own = next((each for each in placement.resolve(address) if placement.is_own(each)), None)
    if own is None:
        return None
    listener = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own, port))
    except OSError:
        listener.close()
        raise
    return listener


def store_on(listener: socket.socket, *, size: int, timeout: timedelta) -> internals.TCPStore:
    """Make a store that listens on a socket of ``bound``, and takes it over."""
    address, port = listener.getsockname()[:2]
    return internals.store_at(listener, address, port, size=size, timeout=timeout)
