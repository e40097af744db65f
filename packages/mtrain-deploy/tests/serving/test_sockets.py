"""The sockets of `mtrain serve` and `mtrain ui`."""

import socket
from contextlib import closing
from types import SimpleNamespace

import pytest

from mtrain_deploy.serving import process
from mtrain_deploy.serving.settings import ServeSettings
from mtrain_ui.pages import server


def test_answers_are_sent_at_once():
    """Of a socket that does not name its protocol, asyncio does not switch Nagle's algorithm off: 40 ms for each answer."""
    for listen in (process._listener, server._listening):
        with closing(listen("127.0.0.1", 0)) as listener:
            assert listener.proto == socket.IPPROTO_TCP


def test_an_address_has_the_share_of_connections_that_the_settings_give_it(monkeypatch):
    class Seen(Exception):
        """Ends the start of the server."""

    def seen(limits):
        raise Seen(limits.per_address)

    monkeypatch.setattr(process, "protocol", seen)
    monkeypatch.setattr(process, "_listener", lambda host, port: None)
    app = SimpleNamespace(state=SimpleNamespace(service=None))
    for given, expected in ((3, 3), (0, None)):
        with pytest.raises(Seen) as caught:
            process.serve_until_asked(app, ServeSettings(max_connections_per_address=given), print)
        assert caught.value.args == (expected,)
