"""What the libraries' servers and starters would show to other machines and accounts stays here, at the places that see to it."""

import os
import socketserver

from mtrain.backends._horovod import internals
from mtrain.backends._torch.ranks import store
from mtrain.launchers import withheld


def test_the_store_of_torch_listens_at_the_one_address() -> None:
    listener = store.bound("127.0.0.1", 0)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert store.bound("192.0.2.1", 0) is None, "it is none of this machine"


def test_the_rendezvous_of_horovodrun_listens_on_the_loopback_interface() -> None:
    with socketserver.TCPServer(("", 0), socketserver.BaseRequestHandler, bind_and_activate=False) as server:
        internals._bind_to_loopback(server)
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_starter_sees_no_secret_and_its_ranks_see_all() -> None:
    own = {
        "HF_TOKEN": "walrus-1",
        "FLAGS_print_launcher_env": "true",
        "PATH": "/bin",
        "http_proxy": "http://me:walrus-5@x",
    }
    shown = withheld.keep(own)
    try:
        assert "walrus" not in " ".join([*shown, *shown.values()])
        assert shown["PATH"] == "/bin"
        assert withheld.restore({**shown, "RANK": "1"}) == {**own, "RANK": "1"}
    finally:
        os.close(int(shown[withheld.VARIABLE].rpartition("/")[2]))
