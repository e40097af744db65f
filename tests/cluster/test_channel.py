"""Messages between leader and agent: whole, in order, from peers that beat, and nothing that could hurt from those that do not."""

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from mtrain.jobs.hosts import channel as channels
from mtrain.jobs.hosts.agent_processes import Line, hear, open_line
from mtrain.jobs.hosts.channel import Channel, Lost, Refused, ask_all
from mtrain.jobs.hosts.disconnection import Cause, Disconnection

pytestmark = pytest.mark.smoke


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


def until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_messages_arrive_whole_and_in_order_both_ways(pair):
    left, right = pair()
    for number in range(200):
        left.send({"event": "record", "number": number, "text": "ä\n" * number})
        right.send({"event": "record", "number": -number})
    assert [right.wait(60)["number"] for _ in range(200)] == list(range(200))
    assert [left.wait(60)["number"] for _ in range(200)] == [-number for number in range(200)]


def test_a_question_gets_its_own_answer_whatever_else_is_told(pair):
    leader, agent = pair()
    first, second = leader.ask("facts", wanted=1), leader.ask("facts", wanted=2)
    questions = [agent.wait(60), agent.wait(60)]
    for question in reversed(questions):
        agent.send({"event": "record", "record": {}})
        agent.send({"answer": question["ask"], "facts": question["wanted"]})
    assert leader.answer(first, timeout_s=60)["facts"] == 1
    assert leader.answer(second, timeout_s=60)["facts"] == 2
    assert len(leader.receive()) == 2


def test_a_peer_that_cannot_says_why_and_one_that_is_slow_or_gone_is_told_apart(pair):
    leader, agent = pair()
    number = leader.ask("port")
    agent.send({"answer": number, "error": "no such address"})
    with pytest.raises(Refused, match="no such address"):
        leader.answer(number, timeout_s=60)
    number = leader.ask("port")
    with pytest.raises(TimeoutError, match="agent did not answer"):
        leader.answer(number, timeout_s=0.0)
    agent.close()
    with pytest.raises(Lost, match="closed"):
        leader.answer(number, timeout_s=60)


def test_all_are_asked_at_once_and_each_failure_stands_in_the_place_of_its_peer(pair):
    ends = [pair() for _ in range(3)]

    def answer(agent: Channel, content: dict) -> None:
        agent.send({"answer": agent.wait(60)["ask"], **content})

    answering = [
        threading.Thread(target=answer, args=(ends[0][1], {"port": 7})),
        threading.Thread(target=answer, args=(ends[1][1], {"error": "taken", "code": 1})),
    ]
    for thread in answering:
        thread.start()
    ends[2][1].close()
    actual = ask_all([leader for leader, _ in ends], "port", timeout_s=10, each=[{"port": n} for n in range(3)])
    for thread in answering:
        thread.join()
    assert actual[0]["port"] == 7
    assert [answer["error"] for answer in actual[1:]] == ["taken", "the connection was closed"]
    assert [answer.get("code") for answer in actual[1:]] == [1, None]


def test_every_beat_of_a_peer_ends_its_silence(pair):
    left, _ = pair(beat_s=0.05)
    for _ in range(5):
        longest = left.silent_s

        def broken() -> bool:
            nonlocal longest
            longest, before = left.silent_s, longest
            return longest < before

        until(broken)
    assert left.receive() == [], "a beat is no message"


def test_silence_is_noticed(raw):
    _, channel = raw
    channel.silence_s = 0.2
    until(lambda: channel.lost is not None)
    assert channel.lost.cause is Cause.SILENT
    assert channel.lost.silent_s > 0.2
    with pytest.raises(Lost):
        channel.wait(0)


WORDED = {
    "closed here": Disconnection(cause=Cause.CLOSED_HERE),
    "the connection was closed": Disconnection(cause=Cause.CLOSED_THERE),
    "silent for 12 s": Disconnection(cause=Cause.SILENT, silent_s=12.4),
    "takes nothing of what is sent": Disconnection(cause=Cause.NOT_READING),
    "sent what is no message: 'silent for 3 s'": Disconnection(cause=Cause.NO_MESSAGE, detail="silent for 3 s"),
    "sent a line of more than 100 bytes": Disconnection(cause=Cause.LINE_TOO_LONG, limit_bytes=100),
    "the connection failed: Input/output error": Disconnection(
        cause=Cause.CONNECTION_FAILED, detail="Input/output error"
    ),
    "failed: silent": Disconnection(cause=Cause.FAILED_HERE, detail="silent"),
}


@pytest.mark.parametrize("text", WORDED)
def test_each_way_to_lose_a_peer_has_its_words(text):
    assert str(WORDED[text]) == text
    assert str(Lost(WORDED[text])) == text


def test_only_silence_is_silence_whatever_the_words_are():
    assert [text for text in WORDED if WORDED[text].is_silence] == ["silent for 12 s"]
    assert {disconnection.cause for disconnection in WORDED.values()} == set(Cause)


def test_the_last_words_of_a_peer_are_heard_before_its_end(pair):
    left, right = pair()
    for number in range(50):
        right.send({"event": number})
    right.close()
    assert [left.wait(60)["event"] for _ in range(50)] == list(range(50))
    with pytest.raises(Lost, match="closed"):
        left.wait(60)


def test_the_last_words_reach_a_peer_that_is_still_talking():
    """A TCP connection that is closed on bytes which nobody has read is reset, and what was on its way is thrown away."""
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as server:
            peer, accepted = socket.create_connection(server.getsockname()), server.accept()[0]
        descriptor = accepted.detach()
        leader = Channel(descriptor, descriptor, peer="x")
        talking = threading.Thread(target=talk, args=(peer,))
        talking.start()
        leader.send({"do": "bye", "text": "x" * 1_000_000})
        closing = threading.Thread(target=leader.close, kwargs={"flush_s": 60.0})
        closing.start()
        with peer, peer.makefile("rb") as stream:
            message = stream.readline()
            assert len(message) > 1_000_000, "its end was lost"
            peer.shutdown(socket.SHUT_RDWR)
        talking.join()
        closing.join()


def talk(peer: socket.socket) -> None:
    """For as long as the connection stands."""
    with suppress(OSError):
        while True:
            peer.sendall(b'{"event": "record"}\n')


def test_a_peer_that_never_closes_its_end_is_waited_for_so_long_and_no_longer(raw):
    _, channel = raw
    channel.close(flush_s=0.2)
    assert channel.lost == Disconnection(cause=Cause.CLOSED_HERE)


def test_a_peer_that_closes_on_words_it_has_not_read_has_closed(raw):
    stranger, channel = raw
    channel.send({"do": "stop"})
    until(lambda: select.select([stranger], [], [], 0)[0])
    stranger.close()
    until(lambda: channel.lost is not None)
    assert channel.lost == Disconnection(cause=Cause.CLOSED_THERE)


def test_what_nobody_waits_for_any_more_is_not_waited_for(pair):
    leader, _ = pair()
    (answer,) = ask_all([leader], "check", timeout_s=600, stop=lambda: True)
    assert "did not answer" in answer["error"]


def test_what_a_login_shell_prints_is_passed_over_and_kept_for_the_explanation(raw):
    stranger, channel = raw
    stranger.sendall(b"Welcome to node2!\n{ not json\n" + b'{"event": "hello"}\n')
    assert channel.wait(60) == {"event": "hello"}
    assert list(channel.noise) == ["Welcome to node2!", "{ not json"]


def test_what_looks_like_a_message_before_the_hello_of_an_agent_is_passed_over_too(pair):
    agent, leader = pair(skips_noise=True)
    for printed in ({"motd": "be kind"}, {"motd": {"event": "none"}}, {"event": "hello"}):
        agent.send(printed)
    assert leader.wait(60) == {"event": "hello"}


@pytest.mark.parametrize(
    ("printed", "shown"), [(["Choose a shell", "(1 or 2)"], "Choose a shell / (1 or 2)"), ([], "")]
)
def test_an_agent_that_does_not_come_is_told_with_what_its_login_shell_printed(printed, shown):
    channel = SimpleNamespace(wait=lambda wait_s: None, shell_output=printed)
    found = hear(Line(host="node2", node=1, channel=channel, process=None, stderr=None), timeout_s=0.0)
    assert shown in found.line()
    assert ("no agent has come up" in found.line(), "has said nothing" in found.line()) == (bool(printed), not printed)


@pytest.mark.parametrize("rubbish", [b"rm -rf\n", b"[1, 2]\n", b"\x80\x04\x95\n", b"[" * 100_000 + b"\n"])
def test_a_peer_that_stops_speaking_our_language_is_lost(raw, rubbish):
    stranger, channel = raw
    stranger.sendall(b'{"event": "hello"}\n' + rubbish)
    channel.wait(60)
    until(lambda: channel.lost is not None)
    assert channel.lost.cause is Cause.NO_MESSAGE


def test_a_line_without_end_does_not_fill_the_memory(raw, monkeypatch):
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 100_000)
    stranger, channel = raw
    stranger.settimeout(10)
    try:
        for _ in range(100):
            stranger.sendall(b"x" * 10_000)
    except OSError:
        pass
    until(lambda: channel.lost is not None)
    assert channel.lost == Disconnection(cause=Cause.LINE_TOO_LONG, limit_bytes=100_000)
    with pytest.raises(ValueError, match="at most 100000"):
        channel.send({"text": "x" * 100_000})


def test_a_peer_that_takes_nothing_does_not_hold_up_the_sender(raw, monkeypatch):
    monkeypatch.setattr(channels, "MAX_UNSENT_BYTES", 2_000_000)
    _, channel = raw
    for _ in range(100):
        channel.send({"text": "x" * 100_000})
    assert channel.lost == Disconnection(cause=Cause.NOT_READING)


def test_a_closed_channel_leaves_no_thread_and_no_open_file(pair):
    before = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    left, right = pair()
    left.send({"event": "hello"})
    left.close()
    right.close()
    left.close()
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(timeout=60)  # one that has been told to end may not have come to it yet
    assert set(threading.enumerate()) <= before[1]
    assert set(os.listdir("/proc/self/fd")) <= before[0]


# ------------------------------------------------------------------------------------------------ what a login shell prints
NOISE = {
    "without a newline": "printf 'Welcome to node2! '",
    "like JSON": """printf '{"motd": "be kind"}\\n{}\\n[1, 2]\\n'""",
    "like JSON, without a newline": """printf '{"motd": 1}'""",
    "a long line": "head -c 100000 /dev/zero | tr '\\0' x",
    "control characters": "printf '\\033[2Jhello\\r'",
}


@pytest.mark.job
@pytest.mark.parametrize("name", NOISE)
def test_an_agent_is_heard_whatever_its_login_shell_prints_first(name):
    command = ["sh", "-c", f'{NOISE[name]}; exec "$@"', "sh", sys.executable, "-m", "mtrain.jobs.hosts.agent"]
    line = open_line("node2", 1, argv=command, environ=os.environ)
    message = hear(line, timeout_s=120.0)
    line.channel.send({"do": "bye"})
    line.end(wait_s=10.0)
    assert isinstance(message, dict), message
    assert message["event"] == "hello"


@pytest.mark.job
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "ends"])
def test_what_a_login_shell_prints_is_shown_where_no_agent_comes(waits):
    script = f"printf 'Choose a shell \\033[5m(1 or 2): '; {'sleep 600' if waits else 'exit 3'}"
    line = open_line("node2", 1, argv=["sh", "-c", script], environ=os.environ)
    actual = hear(line, timeout_s=1.0 if waits else 60.0)
    line.end(wait_s=0.2)
    assert "Choose a shell" in actual.line()
    assert actual.line().isprintable()


def test_a_peer_that_is_gone_is_missed_by_a_process_that_is_held_up_again_and_again(monkeypatch):
    now = 0.0
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: now))
    idle = SimpleNamespace(serve=lambda channel: None, attend=lambda channel: None)
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()
    with ours:
        channel = Channel(descriptor, os.dup(descriptor), peer="leader", silence_s=10.0, beat_s=1.0, thread=idle)
        for heard in (True, True, False, False, False, False):
            now += 8.0
            channel.tick(now)
            assert channel.lost is None or not heard
            if heard:
                ours.sendall(b"{}\n")
                channel.read()
        assert channel.lost == Disconnection(cause=Cause.SILENT, silent_s=16.0)
        channel.finish()


@pytest.mark.job
def test_a_process_that_was_stopped_does_not_take_its_own_pause_for_the_silence_of_a_peer_that_was_stopped_too():
    script = """
        import os, sys
        from mtrain.jobs.hosts.channel import Channel, Lost
        channel = Channel(os.dup(0), os.dup(1), peer="leader", silence_s=4.0)
        try:
            while channel.wait(1.0) is None:
                pass
        except Lost as lost:
            sys.exit(str(lost))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        try:
            agent.stdin.write(b"{}\n")
            agent.stdin.flush()
            assert agent.stdout.readline() == b"{}\n"
            agent.send_signal(signal.SIGSTOP)
            time.sleep(6.0)  # longer than it would wait for the peer; nothing is sent meanwhile
            agent.send_signal(signal.SIGCONT)
            assert agent.stdout.readline() == b"{}\n", agent.stderr.read()
            _, told = agent.communicate(b'{"event": "record"}\n', timeout=60)
            assert (agent.returncode, told) == (0, b"")
        finally:
            agent.kill()
