"""Ports that a plan chooses are still free when the ranks come to listen on them."""

import socket

import pytest

from mtrain.system import placement

THIRD_LOOPBACK = "127.0.0.3"


def test_the_port_lies_below_those_of_outgoing_connections_and_has_free_ones_behind_it():
    port = placement.free_port()
    assert port in placement.QUIET_PORTS
    for following in range(16):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port + following))


def test_a_row_of_ports_of_which_one_is_in_use_is_passed_over(monkeypatch):
    starts = iter([0, 100])
    monkeypatch.setattr("secrets.randbelow", lambda limit: next(starts))
    with socket.socket() as listener:
        listener.bind((THIRD_LOOPBACK, placement.QUIET_PORTS.start + 5))
        assert placement.free_port(THIRD_LOOPBACK) == placement.QUIET_PORTS.start + 100


def test_the_system_chooses_where_every_row_has_a_port_in_use(monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda limit: 0)
    with socket.socket() as listener:
        listener.bind((THIRD_LOOPBACK, placement.QUIET_PORTS.start))
        assert placement.free_port(THIRD_LOOPBACK) != placement.QUIET_PORTS.start


def test_an_address_of_another_machine_has_no_port_here():
    with pytest.raises(OSError, match="assign requested address"):
        placement.free_port("203.0.113.1")
