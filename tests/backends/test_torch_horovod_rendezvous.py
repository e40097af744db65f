"""The server at which Horovod's ranks leave their addresses, as `doctor --build-horovod` builds it."""

import http.client
import threading

import pytest

pytestmark = pytest.mark.horovod


def test_addresses_of_one_group_are_forgotten_whatever_the_order_in_which_ranks_have_read_the_others() -> None:
    """Old addresses ended ranks with "Connection refused" in a second `init` after `shutdown`."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    scopes = ("global", "local_a", "cross_0", "cross_1")
    with RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0) as server:
        server.init(get_host_assignments(parse_hosts("a:2"), 2))
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(method: str, path: str, body: bytes = b"") -> int:
            connection = http.client.HTTPConnection(*server.server_address, timeout=30)
            connection.request(method, path, body=body, headers={"Content-Length": str(len(body))})
            status = connection.getresponse().status
            connection.close()
            return status

        for scope in scopes:
            assert ask("PUT", f"/{scope}/address", b"there") == 200
        for path in ("global/0", "global/1", "local_a/0", "cross_0/0", "local_a/1", "cross_1/1"):
            assert ask("DELETE", f"/{path}") == 200
        left = [scope for scope in scopes if ask("GET", f"/{scope}/address") != 404]
        server.shutdown()
    assert left == []
