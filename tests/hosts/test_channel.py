"""Messages between leader and agent: whole, in order, from peers that beat, and nothing that could hurt from those that do not."""

import os
import socket
import threading
import time

import pytest

from mtrain.hosts import channel as channels
from mtrain.hosts.channel import Channel, Lost, Refused, ask_all


@pytest.fixture
def pair():
    made = []

    def make(**settings):
        ends = socket.socketpair()
        made.extend(
            Channel(end.fileno(), os.dup(end.detach()), peer=name, **settings)
            for end, name in zip(ends, ("agent", "leader"), strict=True)
        )
        return made[-2:]

    yield make
    for end in made:
        end.close(flush_s=0.0)


@pytest.fixture
def raw():
    """A channel whose peer is this test, byte by byte."""
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()
    channel = Channel(descriptor, os.dup(descriptor), peer="stranger")
    yield ours, channel
    ours.close()
    channel.close(flush_s=0.0)


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_messages_arrive_whole_and_in_order_both_ways(pair):
    left, right = pair()
    for number in range(200):
        left.send({"event": "record", "number": number, "text": "ä\n" * number})
        right.send({"event": "record", "number": -number})
    assert [right.wait(10)["number"] for _ in range(200)] == list(range(200))
    assert [left.wait(10)["number"] for _ in range(200)] == [-number for number in range(200)]


def test_a_question_gets_its_own_answer_whatever_else_is_told(pair):
    leader, agent = pair()
    first, second = leader.ask("facts", wanted=1), leader.ask("facts", wanted=2)
    questions = [agent.wait(10), agent.wait(10)]
    for question in reversed(questions):
        agent.send({"event": "record", "record": {}})
        agent.send({"answer": question["ask"], "facts": question["wanted"]})
    assert leader.answer(first, timeout_s=10)["facts"] == 1
    assert leader.answer(second, timeout_s=10)["facts"] == 2
    assert len(leader.receive()) == 2


def test_a_peer_that_cannot_says_why_and_one_that_is_slow_or_gone_is_told_apart(pair):
    leader, agent = pair()
    number = leader.ask("port")
    agent.send({"answer": number, "error": "no such address"})
    with pytest.raises(Refused, match="no such address"):
        leader.answer(number, timeout_s=10)
    number = leader.ask("port")
    with pytest.raises(TimeoutError, match="agent did not answer"):
        leader.answer(number, timeout_s=0.0)
    agent.close()
    with pytest.raises(Lost, match="closed"):
        leader.answer(number, timeout_s=10)


def test_all_are_asked_at_once_and_each_failure_stands_in_the_place_of_its_peer(pair):
    ends = [pair() for _ in range(3)]

    def answer(agent: Channel, content: dict) -> None:
        agent.send({"answer": agent.wait(10)["ask"], **content})

    answering = [
        threading.Thread(target=answer, args=(ends[0][1], {"port": 7})),
        threading.Thread(target=answer, args=(ends[1][1], {"error": "taken", "code": 1})),
    ]
    for thread in answering:
        thread.start()
    ends[2][1].close()
    found = ask_all([leader for leader, _ in ends], "port", timeout_s=10, each=[{"port": n} for n in range(3)])
    for thread in answering:
        thread.join()
    assert found[0]["port"] == 7
    assert [answer["error"] for answer in found[1:]] == ["taken", "the connection was closed"]
    assert [answer.get("code") for answer in found[1:]] == [1, None]


def test_a_peer_that_beats_is_never_silent_and_one_that_stops_is_lost(pair):
    left, _ = pair(beat_s=0.05, silence_s=5.0)
    time.sleep(0.5)
    assert left.lost is None
    assert left.silent_s < 0.4


def test_silence_is_noticed(raw):
    _, channel = raw
    channel.silence_s = 0.2
    until(lambda: channel.lost is not None)
    assert channel.lost.startswith("silent for")
    with pytest.raises(Lost):
        channel.wait(0)


def test_the_last_words_of_a_peer_are_heard_before_its_end(pair):
    left, right = pair()
    for number in range(50):
        right.send({"event": number})
    right.close()
    assert [left.wait(10)["event"] for _ in range(50)] == list(range(50))
    with pytest.raises(Lost, match="closed"):
        left.wait(10)


def test_what_a_login_shell_prints_is_passed_over_and_kept_for_the_explanation(raw):
    stranger, channel = raw
    stranger.sendall(b"Welcome to node2!\n{ not json\n" + b'{"event": "hello"}\n')
    assert channel.wait(10) == {"event": "hello"}
    assert list(channel.noise) == ["Welcome to node2!", "{ not json"]


@pytest.mark.parametrize("rubbish", [b"rm -rf\n", b"[1, 2]\n", b"\x80\x04\x95\n", b"[" * 100_000 + b"\n"])
def test_a_peer_that_stops_speaking_our_language_is_lost(raw, rubbish):
    stranger, channel = raw
    stranger.sendall(b'{"event": "hello"}\n' + rubbish)
    channel.wait(10)
    until(lambda: channel.lost is not None)
    assert "no message" in channel.lost


def test_a_line_without_end_does_not_fill_the_memory(raw, monkeypatch):
    monkeypatch.setattr(channels, "LIMIT_BYTES", 100_000)
    stranger, channel = raw
    stranger.settimeout(10)
    try:
        for _ in range(100):
            stranger.sendall(b"x" * 10_000)
    except OSError:
        pass
    until(lambda: channel.lost is not None)
    assert "more than 100000 bytes" in channel.lost
    with pytest.raises(ValueError, match="at most 100000"):
        channel.send({"text": "x" * 100_000})


def test_a_peer_that_takes_nothing_does_not_hold_up_the_sender(raw, monkeypatch):
    monkeypatch.setattr(channels, "WAITING_BYTES", 2_000_000)
    _, channel = raw
    began = time.monotonic()
    for _ in range(100):
        channel.send({"text": "x" * 100_000})
    assert time.monotonic() - began < 10
    assert channel.lost == "takes nothing of what is sent"


def test_a_closed_channel_leaves_no_thread_and_no_open_file(pair):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    left, right = pair()
    left.send({"event": "hello"})
    left.close()
    right.close()
    left.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
