"""The sockets of `mtrain serve` and `mtrain ui`."""

import socket
from contextlib import closing

from mtrain.deploy.serve import process
from mtrain.records.pages import server


def test_answers_are_sent_at_once():
    """Of a socket that does not name its protocol, asyncio does not switch Nagle's algorithm off: 40 ms for each answer."""
    for listen in (process._listener, server._listening):
        with closing(listen("127.0.0.1", 0)) as listener:
            assert listener.proto == socket.IPPROTO_TCP
