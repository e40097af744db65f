"""The same command on every host, by hand: hosts of one job find each other, and any that would train something else is
refused."""

import asyncio
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

import mtrain.jobs.hosts.rendezvous
from mtrain.errors import LaunchError, UsageError
from mtrain.jobs.hosts.admission import Party, difference
from mtrain.jobs.hosts.agent import hello
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.connections import Addresses
from mtrain.jobs.hosts.handshake import Unproven, prove
from mtrain.jobs.hosts.joining import join
from mtrain.jobs.hosts.listener import MAX_UNIDENTIFIED, Listener
from mtrain.jobs.hosts.messages import Farewell
from mtrain.jobs.hosts.rendezvous import open_meeting
from mtrain.jobs.run.host_command import Orders
from mtrain.system.environment import caller
from tests.ports import held_port

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
SPEC = {"train": {"batch_size": 8, "seed": 0}, "cluster": {"ips": HOSTS, "node_rank": None, "slots": None}}
JOINING = """
import json, sys
from mtrain.errors import MtrainError
from mtrain.jobs.hosts.agent import hello
from mtrain.jobs.hosts.admission import Party
from mtrain.jobs.hosts.joining import join
fields = json.loads(sys.argv[1])
party = Party(**fields, line=lambda node: f"mtrain --node-rank {node}")
try:
    farewell = join(party, timeout_s=60, note=lambda text: None, again=False)
    print(json.dumps([farewell.code, farewell.text]))
except MtrainError as error:
    print(json.dumps([error.exit_code, str(error)]))
"""


def fields(node: int, port: int, *, hosts=HOSTS, secret="", **changes):
    values = json.loads(json.dumps(SPEC))
    for path, value in changes.items():
        section, key = path.split("__")
        values[section][key] = value
    values["cluster"]["node_rank"] = node
    return {"hosts": hosts, "node": node, "port": port, "mode": "train", "values": values, "secret": secret}


def party(node: int, port: int, **changes) -> Party:
    return Party(**fields(node, port, **changes), line=lambda node: f"mtrain --node-rank {node}")


@pytest.fixture(autouse=True)
def few_come_late(monkeypatch):
    """Shorten the time in which late hosts are answered: where none comes, the wait would be long."""
    monkeypatch.setattr(mtrain.jobs.hosts.rendezvous, "TELLING_S", 0.3)


@pytest.fixture
def port():
    return held_port()


@pytest.fixture
def meeting(port):
    """The first host's; closed at the end, which ends its agent."""
    messages = []
    made = open_meeting(party(0, port), python=sys.executable, environ=caller(), note=messages.append)
    made.told = messages
    yield made
    made.close()


@pytest.fixture
def joining(port):
    """Processes of other hosts; ``answers`` waits for them: (exit code, last words) of each."""
    started = []

    def start(node: int, **changes) -> subprocess.Popen[str]:
        original = json.dumps(fields(node, port, **changes))
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", JOINING, original], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    def answers():
        results = []
        for process in started:
            out, problems = process.communicate(timeout=60)
            assert process.returncode == 0, problems
            results.append(tuple(json.loads(out)))
        return results

    start.answers = answers
    yield start
    for process in started:
        process.kill()
        process.communicate()


def gather(meeting, nodes=range(3), *, timeout_s=60.0, stop=lambda: False):
    return meeting.gather(nodes, timeout_s=timeout_s, stop=stop)


def goodbye(members, code: int = 0, text: str = "") -> None:
    for member in members.values():
        member.channel.send({"do": "bye", "code": code, "text": text})


@pytest.mark.job
def test_hosts_find_the_first_one_whichever_comes_first_and_all_hear_how_the_job_ended(meeting, joining):
    joining(2)
    joining(1)
    members, missing = gather(meeting)
    assert missing == []
    assert [members[node].host for node in range(3)] == HOSTS
    assert members[2].label == f"127.0.0.3 ({socket.gethostname()})"
    goodbye(members, 1, "error: rank 0 failed")
    assert joining.answers() == [(1, "error: rank 0 failed")] * 2


@pytest.mark.job
def test_a_host_is_refused_only_by_a_refusal_whatever_the_text_of_the_farewell_is(meeting, joining):
    joining(1)
    joining(2)
    members, _ = gather(meeting, [1, 2])
    members[1].channel.send(Farewell(code=2, text="error: a rank refused its data").message())
    members[2].channel.send(Farewell(code=2, text="as printed", refusal="as refused").message())
    assert joining.answers() == [(2, "error: a rank refused its data"), (2, "as refused")]


def test_a_farewell_survives_its_message_and_prints_the_same_under_other_versions():
    farewells = [Farewell(code=0, discard=True), Farewell.for_error("no", code=1), Farewell.for_refusal("no")]
    assert [Farewell.of(json.loads(json.dumps(each.message()))) for each in farewells] == farewells
    assert [(each.code, each.text, each.refusal) for each in farewells[1:]] == [
        (1, "error: no", None),
        (2, "error: no", "no"),
    ]


@pytest.mark.job
def test_a_host_that_never_comes_is_named_with_the_line_to_type_there(meeting, joining, monkeypatch):
    joining(1)
    first, _ = gather(meeting, [0, 1])
    monkeypatch.setattr(mtrain.jobs.hosts.rendezvous, "SILENT_WAIT_S", 0.0)
    members, missing = gather(meeting, [1, 2], timeout_s=1.0)
    goodbye(first)
    assert sorted(members) == [1]
    assert [finding.hosts for finding in missing] == [("127.0.0.3",)]
    assert missing[0].line() == (
        "meeting 127.0.0.3: has not come within 1 s; start the job there too: mtrain --node-rank 2"
    )
    assert meeting.told[-1] == (
        "waiting for 127.0.0.3; start the job there too, with the same command: mtrain --node-rank 2"
    )


@pytest.mark.job
def test_a_host_that_has_gone_again_while_others_are_waited_for_can_come_back(meeting, joining):
    gone = joining(1)
    first, _ = gather(meeting, [1])
    gone.kill()
    while first[1].channel.lost is None:
        time.sleep(0.02)
    joining(1)
    joining(2)
    members, missing = gather(meeting, [1, 2])
    assert missing == []
    assert [members[node].channel.lost for node in (1, 2)] == [None, None]
    goodbye(members)


@pytest.mark.job
def test_a_second_process_of_a_host_ends_no_job_that_has_begun(meeting, joining):
    joining(1)
    lost = joining(2)
    gather(meeting, [1, 2])
    lost.kill()
    meeting.let_go([2])
    second = joining(1)
    with ThreadPoolExecutor(1) as background:
        gathering = background.submit(gather, meeting, [2])
        message, _ = second.communicate(timeout=60)
        joining(2)
        members, missing = gathering.result()
    assert missing == []
    assert json.loads(message)[0] == 2
    assert "--node-rank: it has 1, which" in message
    goodbye(members)


@pytest.mark.job
def test_a_request_to_end_at_a_host_that_has_come_ends_the_waiting_for_the_others(meeting, joining):
    second_host = joining(1)
    gather(meeting, [1])
    second_host.send_signal(signal.SIGINT)
    members, _ = gather(meeting, [1, 2], timeout_s=600.0)
    goodbye(members, 130, "ended before anything was started")
    assert joining.answers() == [(130, "ended before anything was started")]


@pytest.mark.job
def test_a_second_request_ends_a_host_whose_first_one_says_nothing(meeting, joining):
    second_host = joining(1)
    members, _ = gather(meeting, [1])
    second_host.send_signal(signal.SIGINT)
    assert members[1].channel.wait(60.0)["event"] == "asked"
    second_host.send_signal(signal.SIGINT)
    assert joining.answers() == [(130, "ended before anything was started")]


@pytest.mark.job
def test_a_host_that_comes_while_the_first_one_closes_the_door_behind_another_job_finds_the_next(port, joining):
    with socket.create_server(("127.0.0.1", port)) as before:
        joining(1)
        before.accept()[0].close()
    meeting = open_meeting(party(0, port), python=sys.executable, environ=caller(), note=print)
    members, missing = gather(meeting, [1])
    assert missing == []
    goodbye(members)
    assert joining.answers() == [(0, "")]
    meeting.close()


@pytest.mark.job
def test_the_first_hosts_last_words_count_also_where_its_end_comes_with_them(meeting, joining, tmp_path):
    joining(1)
    members, _ = gather(meeting, [1])
    channel = members[1].channel
    ready = tmp_path / "ready"
    ask_all([channel], "prepare", timeout_s=60, run_dir=str(tmp_path / "run"), node=1, files={})
    script = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    rank = Orders(
        host=HOSTS[1], argv=[sys.executable, "-c", script], env={}, forwarded={}, starts_ranks=False,
        first_rank=1, ranks=1, silence_s=60.0, failure_s=5.0,
    )  # fmt: skip
    channel.send({"do": "start", **dataclasses.asdict(rank)})
    while not ready.exists():
        time.sleep(0.02)
    goodbye(members, 1, "error: rank 0 failed")
    channel.close()
    assert joining.answers() == [(1, "error: rank 0 failed")]


@pytest.mark.job
def test_a_request_to_end_ends_the_waiting(meeting):
    began = time.monotonic()
    gather(meeting, timeout_s=600.0, stop=lambda: time.monotonic() > began + 0.5)


def test_a_first_host_that_does_not_come_is_named_with_the_line_to_type_there(port):
    with pytest.raises(
        LaunchError, match=rf"127\.0\.0\.1, has not answered at port {port}.*start.*: mtrain --node-rank 0"
    ):
        join(party(1, port), timeout_s=1.0, note=lambda text: None, again=False)


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize(
    ("node", "changes", "named"),
    [
        (1, {"train__batch_size": 16}, "train.batch_size: it has 16, the first host 8"),
        (2, {"cluster__slots": [1, 2, 2]}, "cluster.slots: it has 1,2,2, the first host None"),
        (1, {"hosts": [HOSTS[0], HOSTS[2]]}, "--ips: it has 127.0.0.1,127.0.0.3, the first host 127.0.0.1,127.0.0.2"),
        (2, {"hosts": [HOSTS[0], HOSTS[2], HOSTS[1]]}, "--ips: it has 127.0.0.1,127.0.0.3,127.0.0.2"),
        (0, {}, "--node-rank: it has 0, which this host has, too"),
    ],
    ids=["spec", "slots", "fewer hosts", "order", "twice the first"],
)
def test_a_host_with_another_job_is_refused_on_both_sides_by_the_first_difference(
    meeting, joining, node, changes, named
):
    joining(node, **changes)
    with pytest.raises(UsageError) as refused:
        gather(meeting)
    ((code, text),) = joining.answers()
    assert named in str(refused.value)
    assert (code, text) == (2, str(refused.value))


@pytest.mark.parametrize("late", [False, True], ids=["at the same time", "a little later"])
def test_a_job_that_was_refused_for_one_host_tells_the_others_why(meeting, port, late, monkeypatch):
    """Whichever of them is heard first, and whether or not they have come by then."""
    monkeypatch.setattr(mtrain.jobs.hosts.rendezvous, "TELLING_S", 60.0)

    def come(node, **changes):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(HOSTS[node], 0))
        connection.sendall(json.dumps(hello(job=party(node, port, **changes).job())).encode() + b"\n")
        return connection

    wrong = come(1, train__batch_size=16)
    with ThreadPoolExecutor(1) as background:
        right = None if late else come(2)
        gathering = background.submit(gather, meeting, [1, 2])
        closed(wrong)
        right = right or come(2)
        with pytest.raises(UsageError) as refused:
            gathering.result()
    meeting.close()
    messages = [json.loads(line) for line in closed(right).splitlines()]
    assert Farewell.for_refusal(str(refused.value)).message() in messages


def closed(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    with connection, connection.makefile("rb") as stream:
        return stream.read()


@pytest.mark.job
def test_a_place_that_is_taken_is_refused(meeting, joining):
    joining(1)
    members, _ = gather(meeting, [0, 1])
    joining(1)
    with pytest.raises(UsageError, match=r"--node-rank: it has 1, which 127\.0\.0\.2 .* has, too"):
        gather(meeting, [2])
    goodbye(members)
    assert [code for code, _ in joining.answers()] == [2, 2]


@pytest.mark.parametrize("secret", ["", "open sesame"], ids=["no secret", "one secret"])
@pytest.mark.parametrize("wanted", [([1, 2], [2]), ([2], [1, 2])], ids=["the one calls", "the other calls"])
def test_two_hosts_that_both_take_themselves_for_the_first_find_each_other(port, secret, wanted):
    orders = (HOSTS, [HOSTS[1], HOSTS[0], HOSTS[2]])
    with ExitStack() as stack:
        firsts = [
            stack.enter_context(
                closing(
                    open_meeting(
                        party(0, port, hosts=hosts, secret=secret),
                        python=sys.executable,
                        environ=caller(),
                        note=print,
                    )
                )
            )
            for hosts in orders
        ]
        background = stack.enter_context(ThreadPoolExecutor(2))
        waiting = [background.submit(gather, first, nodes) for first, nodes in zip(firsts, wanted, strict=True)]
        for each in waiting:
            with pytest.raises(UsageError, match=r"--ips: it has "):
                each.result()


@pytest.mark.job
def test_a_job_of_other_hosts_is_refused_and_ends_nothing_here(meeting, joining):
    other = joining(1, hosts=[HOSTS[0], "127.0.0.9"])
    joining(1)
    with ThreadPoolExecutor(1) as background:
        gathering = background.submit(gather, meeting)
        other.wait(60)
        joining(2)
        members, missing = gathering.result()
    assert missing == []
    goodbye(members)
    codes = sorted(code for code, _ in joining.answers())
    assert codes == [0, 0, 2]


@pytest.mark.job
@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b'{"event": "hello", "job": 7}\n', b'{"do": "start"}\n', b""]
)
def test_strangers_are_passed_over(meeting, joining, port, words):
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(words)
        joining(1)
        joining(2)
        members, missing = gather(meeting)
    assert missing == []
    goodbye(members)


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_refused(meeting, port):
    with pytest.raises(
        UsageError, match=rf"cluster.control_port: the hosts cannot meet at port {port} of 127\.0\.0\.1"
    ):
        open_meeting(party(0, port), python=sys.executable, environ=caller(), note=print)
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is no address of this machine"):
        open_meeting(party(0, port, hosts=["192.0.2.1"]), python=sys.executable, environ=caller(), note=print)


def test_another_version_is_the_first_difference():
    mine, theirs = party(0, 1).job(), party(1, 1, train__seed=9).job()
    assert difference(mine, theirs, version="0.0.0").startswith("it has mtrain 0.0.0")


# ------------------------------------------------------------------------------------------------------- a secret of hosts
@pytest.mark.parametrize(
    "words",
    [
        {"event": "hello", "job": {"node": "first", "hosts": HOSTS, "spec": {}}},
        {"event": "hello", "job": {"node": 1, "hosts": 5, "spec": {}}},
        {"event": "hello", "job": {"node": 1, "hosts": [1, "a"], "spec": {}}},
        {"event": "hello", "job": {"node": 1, "hosts": HOSTS, "mode": "train", "spec": [1]}},
        {"do": "bye", "code": 2, "text": "error: go home"},
    ],
    ids=["node", "hosts", "mixed hosts", "spec", "goodbye"],
)
def test_a_stranger_who_knows_the_words_ends_no_job(meeting, joining, port, words):
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(json.dumps(words).encode() + b"\n")
        assert gather(meeting, [1], timeout_s=1.0)[1][0].text == "has not come within 1 s"


STRANGER = "127.0.0.9"
"""The address of no host of the job."""


@pytest.mark.job
@pytest.mark.parametrize("place", [1, 2, 0], ids=["second", "third", "first"])
def test_a_stranger_who_says_he_is_a_host_of_the_job_neither_ends_it_nor_is_told_of_it(meeting, joining, port, place):
    """He names the job's addresses and has another version, which would be a reason to refuse the whole job."""
    words = hello(job={**party(place, port).job(), "spec": {}}) | {"version": "0.0.0", "host": "\x1b[2Jfriend"}
    joining(1)
    with socket.create_connection(("127.0.0.1", port), source_address=(STRANGER, 0)) as stranger:
        stranger.sendall(json.dumps(words).encode() + b"\n")
        members, missing = gather(
            meeting, [1, 2], timeout_s=60.0, stop=lambda: any(STRANGER in n for n in meeting.told)
        )
        message = closed(stranger).decode()
    joining(2)
    members, missing = gather(meeting, [1, 2])
    assert missing == []
    assert all(note.isprintable() for note in meeting.told)
    assert "does not take 127.0.0.9" in message
    assert not [word for word in ("batch_size", "mtrain 0", "127.0.0.3") if word in message and word != HOSTS[place]]
    goodbye(members)


def test_a_stranger_who_comes_after_a_refusal_is_not_told_its_reason(meeting, port, monkeypatch):
    monkeypatch.setattr(mtrain.jobs.hosts.rendezvous, "TELLING_S", 60.0)

    def say(source: str, node: int, **changes: object) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0)) as connection:
            connection.sendall(json.dumps(hello(job=party(node, port, **changes).job())).encode() + b"\n")
            return closed(connection)

    with ThreadPoolExecutor(1) as background:
        gathering = background.submit(gather, meeting, [1, 2])
        assert b"batch_size" in say(HOSTS[1], 1, train__batch_size=16)
        assert b"batch_size" not in say(STRANGER, 2)
        assert b"batch_size" in say(HOSTS[2], 2)
        with pytest.raises(UsageError, match=r"train\.batch_size"):
            gathering.result()


@pytest.mark.job
@pytest.mark.parametrize("secret", ["", "open sesame"], ids=["no secret", "one secret"])
def test_many_who_connect_and_say_nothing_bind_few_threads_and_keep_no_host_out(port, joining, secret):
    first = open_meeting(party(0, port, secret=secret), python=sys.executable, environ=caller(), note=print)
    before, most = threading.active_count(), 0

    def watched() -> bool:
        nonlocal most
        most = max(most, threading.active_count() - before)
        return False

    silent = []
    try:
        silent += [socket.create_connection(("127.0.0.1", port), source_address=(STRANGER, 0)) for _ in range(50)]
        gather(first, [1], timeout_s=0.5, stop=watched)
        silent += [socket.create_connection(("127.0.0.1", port), source_address=(STRANGER, 0)) for _ in range(50)]
        joining(1, secret=secret)
        members, missing = gather(first, [1], stop=watched)
        assert missing == []
        goodbye(members)
        assert most < 40
    finally:
        for connection in silent:
            connection.close()
        first.close()


def test_of_strangers_who_say_nothing_those_beyond_the_limit_are_closed(port, monkeypatch):
    monkeypatch.setattr(mtrain.jobs.hosts.listener, "HELLO_S", float("inf"))
    most, strangers = MAX_UNIDENTIFIED[False], []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.0)

    async def closed() -> list[bytes]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            return [await loop.sock_recv(connection, 1) for connection in strangers[most:]]

    listener = Listener(
        server, party(0, port), addresses=Addresses(["192.0.2.1"]), answer=print, greeting={}, note=print
    )
    with ExitStack() as stack:
        stack.callback(listener.close)
        for _ in range(most + 3):
            strangers.append(stack.enter_context(socket.create_connection(server.getsockname())))
            strangers[-1].setblocking(False)
        assert listener.run(closed) == [b""] * 3
        for connection in strangers[:most]:
            with pytest.raises(BlockingIOError):
                connection.recv(1)


@pytest.fixture
def guarded(port):
    """The first host of a job with a secret."""
    messages = []
    made = open_meeting(
        party(0, port, secret="open sesame"), python=sys.executable, environ=caller(), note=messages.append
    )
    made.told = messages
    yield made
    made.close()


@pytest.mark.smoke
@pytest.mark.job
def test_hosts_with_one_secret_find_each_other(guarded, joining):
    joining(1, secret="open sesame")
    joining(2, secret="open sesame")
    members, missing = gather(guarded)
    assert missing == []
    goodbye(members)
    assert joining.answers() == [(0, "")] * 2


@pytest.mark.job
@pytest.mark.parametrize("secret", ["", "open barley"], ids=["none", "another"])
def test_a_host_without_the_secret_is_refused_and_told_why_and_ends_nothing_here(guarded, joining, secret):
    joining(1, secret=secret)
    _, missing = gather(guarded, [1], stop=lambda: any("was refused" in note for note in guarded.told))
    ((code, text),) = joining.answers()
    assert code == 2
    assert "give the same MTRAIN_CLUSTER_SECRET on every host" in text
    assert [finding.hosts for finding in missing] == [("127.0.0.2",)]


@pytest.mark.job
def test_a_host_with_a_secret_serves_no_first_host_without(meeting, joining):
    joining(1, secret="open sesame")
    gather(meeting, [1], stop=lambda: any("this one has none" in note for note in meeting.told))
    ((code, text),) = joining.answers()
    assert code == 2
    assert "did not prove itself" in text


def prove_here(connection: socket.socket, *, joins: bool) -> None:
    asyncio.run(prove(connection, "open sesame", joins=joins))


class Tapped:
    """A connection that keeps what is said at this end, for somebody who says it again."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.said = b""

    def send(self, part: bytes) -> int:
        count = self.connection.send(part)
        self.said += part[:count]
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def proven(*, joins: bool) -> bytes:
    """All that one of two ends says while both prove themselves."""
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as background:
        other = background.submit(prove_here, there, joins=not joins)
        tapped = Tapped(here)
        prove_here(tapped, joins=joins)
        other.result()
    return tapped.said


@pytest.mark.parametrize("joins", [True, False], ids=["a host that joined", "the first host"])
def test_a_replayed_message_does_not_authenticate_its_sender(joins):
    words = proven(joins=joins)
    assert words.count(b"\n") == 2
    here, there = socket.socketpair()
    with here, there:
        there.sendall(words)
        with pytest.raises(Unproven, match="another MTRAIN_CLUSTER_SECRET"):
            prove_here(here, joins=not joins)


def test_an_echoed_message_does_not_authenticate_its_sender():
    here, there = socket.socketpair()
    with here, there:
        echo = threading.Thread(target=lambda: [there.sendall(part) for part in iter(lambda: there.recv(4096), b"")])
        echo.start()
        with pytest.raises(Unproven):
            prove_here(here, joins=True)
        here.shutdown(socket.SHUT_RDWR)
        echo.join()


@pytest.mark.job
@pytest.mark.parametrize(
    ("node", "code", "expected"),
    [(0, 2, "127.0.0.2 has not come within 4 s"), (1, 1, "has not answered at port {port} for 4 s")],
)
def test_hosts_are_awaited_for_the_time_to_join_and_not_for_that_of_a_failure(tmp_path, node, code, expected):
    port = held_port()
    words = ["--ips", "127.0.0.1,127.0.0.2", "--node-rank", str(node), "--control-port", str(port)]
    words += ["--failure-timeout-s", "600", "-o", "cluster.join_timeout_s=4"]
    argv = [sys.executable, "-m", "mtrain", "train", "-c", "digits", "-b", "ddp", "--nproc-per-node", "1", *words]
    process = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == code, process.stderr
    assert expected.format(port=port) in " ".join((process.stdout + process.stderr).split())
