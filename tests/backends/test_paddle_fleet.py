"""Properties that fleet adds to the Paddle engine: values over its own sockets, its place among the ranks, its
options."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.backends._paddle import rank_environment
from mtrain.backends._paddle.channel import Channel, PeerLost
from mtrain.backends.fleet import Fleet
from mtrain.errors import LaunchError
from tests.ports import held_port
from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]
LATE_S = 33
"""gloo waits for 30 s."""


def as_ranks(size: int, work: Callable[[Channel, int], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """``work(channel, rank)`` on as many threads, each one rank; what it returns or raises, by rank."""
    address = ("127.0.0.1", held_port())
    actual: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            channel = Channel(rank, size, address=address, timeout_s=timeout_s)
            try:
                actual[rank] = work(channel, rank)
            finally:
                channel.close()
        except Exception as error:
            actual[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return actual


class TestChannel:
    """Threads of this process are as good as ranks to it."""

    def test_gathers_values_of_any_size_in_the_order_of_ranks(self):
        def work(channel: Channel, rank: int) -> list[Any]:
            time.sleep(0.05 * (3 - rank))
            return [channel.all_gather({"rank": rank, "many": "x" * 10 ** (2 * rank)}) for _ in range(2)]

        expected = [{"rank": rank, "many": "x" * 10 ** (2 * rank)} for rank in range(4)]
        assert as_ranks(4, work) == [[expected, expected]] * 4

    def test_names_a_rank_that_has_gone(self):
        def work(channel: Channel, rank: int) -> object:
            return None if rank == 1 else channel.all_gather(rank)

        zero, _, two = as_ranks(3, work)
        assert isinstance(zero, PeerLost)
        assert str(zero) == "rank 1 has ended; its log says why"
        assert str(two) == "rank 0 has ended; its log says why"

    def test_gives_up_on_a_rank_that_does_not_come_in_time(self):
        def work(channel: Channel, rank: int) -> object:
            if rank == 1:
                time.sleep(2)
            return channel.all_gather(rank)

        zero, _ = as_ranks(2, work, timeout_s=0.3)
        assert "rank 1 did not come to a collective within 0.3 s (backend.options.timeout_s)" in str(zero)

    def test_says_which_ranks_never_came(self):
        address = ("127.0.0.1", held_port())
        with pytest.raises(PeerLost, match=r"ranks 1, 2 did not come to 127.0.0.1"):
            Channel(0, 3, address=address, timeout_s=0.2)
        with pytest.raises(PeerLost, match=r"rank 0 was not reached at 127.0.0.1"):
            Channel(1, 3, address=address, timeout_s=0.2)

    def test_sends_strangers_away(self):
        address = ("127.0.0.1", held_port())
        results: list[Any] = []
        zero = threading.Thread(
            target=lambda: results.append(Channel(0, 2, address=address, timeout_s=20).all_gather("zero"))
        )
        zero.start()
        for word in (b"GET / HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x04spam", b"\x7f\xff\xff\xff"):
            with socket.socket() as stranger:
                while stranger.connect_ex(address):
                    time.sleep(0.01)
                stranger.sendall(word)
        assert Channel(1, 2, address=address, timeout_s=20).all_gather("one") == ["zero", "one"]
        zero.join()
        assert results == [["zero", "one"]]

    def test_a_rank_that_does_not_know_the_secret_is_sent_away_and_told_nothing(self):
        address = ("127.0.0.1", held_port())
        results: list[Any] = []

        def first() -> None:
            results.append(Channel(0, 2, address=address, timeout_s=20, secret="ours").all_gather("zero"))

        zero = threading.Thread(target=first)
        zero.start()
        with pytest.raises(PeerLost, match="rank 0 was not reached"):
            Channel(1, 2, address=address, timeout_s=0.5, secret="theirs")
        assert Channel(1, 2, address=address, timeout_s=20, secret="ours").all_gather("one") == ["zero", "one"]
        zero.join()
        assert results == [["zero", "one"]]

    def test_an_impostor_in_the_place_of_rank_0_is_not_believed(self):
        heard: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as impostor:

            def answer() -> None:
                with impostor.accept()[0] as connected:
                    for content in (b"\0" * 32, b"\1" * 32):
                        connected.sendall(len(content).to_bytes(4, "big") + content)
                    heard.extend(iter(lambda: connected.recv(1000), b""))

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(PeerLost, match="rank 0 was not reached"):
                Channel(1, 2, address=impostor.getsockname()[:2], timeout_s=0.5, secret="ours").all_gather("private")
            thread.join()
        assert len(b"".join(heard)) == 4 + len("1:") + 64 + len(" ") + 64  # length, rank, nonce, proof: nothing more

    def test_a_message_that_was_changed_on_its_way_is_refused(self):
        def work(channel: Channel, rank: int) -> object:
            if rank == 1:
                peer = channel._peers[0]
                peer.connection.send_bytes(b"\0" * 32 + b"N.")
            return channel.all_gather(rank)

        zero, _ = as_ranks(2, work)
        assert isinstance(zero, PeerLost)

    def test_a_message_that_stops_in_its_middle_ends_the_wait(self):
        def work(channel: Channel, rank: int) -> object:
            if rank == 1:
                os.write(channel._peers[0].connection.fileno(), (1000).to_bytes(4, "big") + b"half")
                time.sleep(2)
                return None
            return channel.all_gather(rank)

        zero, _ = as_ranks(2, work, timeout_s=0.5)
        assert "rank 1 did not come to a collective within 0.5 s" in str(zero)

    def test_says_that_its_port_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="--start-port"):
            Channel(0, 2, address=taken.getsockname()[:2], timeout_s=1)


def test_a_rank_finds_its_place_in_what_the_launcher_says():
    values = {
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:7000,10.0.0.1:7001,10.0.0.2:7000,10.0.0.2:7001",
    }
    assert rank_environment.of_this_rank(values) == rank_environment.OwnRank(
        rank=3, local_rank=1, size=4, first=("10.0.0.1", 7000)
    )
    message = rank_environment.of_this_rank(values | {"MTRAIN_JOB_SECRET": "w0rd"})
    assert message.secret == "w0rd"
    assert "w0rd" not in repr(message)


def test_a_process_that_no_launcher_started_is_told_how_to(monkeypatch):
    for name in rank_environment.NEEDED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        LaunchError, match=r"not started by Paddle's launcher: PADDLE_TRAINER_ID, .* not set; use `mtrain"
    ):
        Fleet(Fleet.Options(device="cpu")).__enter__()


SCRIPT = """
import sys, time
import numpy as np
from mtrain.backends.fleet import Fleet
from mtrain.core.binding import bind
from mtrain.core.interfaces import State
from tests.contract import training
from tests.contract.convnet import build
from tests.contract.training import Case

backend = Fleet(Fleet.Options(device="cpu", **eval(sys.argv[2])))
with backend as session:
    bind(backend.nn, backend.ops)
    c, case = session.collective, Case(accumulate=2)
    model, optimizer = session.prepare(build, case.recipe(c.size))
    session.restore(model, optimizer, State(weights=training.start_weights()))
    batches = session.batches(training.micro_batches(case, rank=c.rank, size=c.size))
    for update in range(2):
        if c.rank == 0:
            time.sleep(float(sys.argv[1]))
        for i in range(2):
            with optimizer.micro_batch(last=i == 1):
                optimizer.backward(model(next(batches))["total"])
        print("norm", repr(optimizer.step(training.rates(update))), flush=True)
    if c.rank == 1:
        time.sleep(float(sys.argv[1]))
    session.state(model, optimizer)
    assert c.all_reduce(np.array([c.rank + 1.0]), "sum").tolist() == [3.0]
"""


def two_ranks(folder: Path, *arguments: str) -> list[str]:
    """The norms that rank 0 of two printed."""
    (folder / "job.py").write_text(SCRIPT)
    starter = (
        *(
            "-m",
            "paddle.distributed.launch",
            "--master",
            f"127.0.0.1:{held_port()}",
            "--nnodes",
            "1",
            "--rank",
            "0",
        ),
        *("--host", "127.0.0.1", "--nproc_per_node", "2", "--log_dir", str(folder / "log")),
    )
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, *starter, sys.executable, str(folder / "job.py"), *arguments]
    process = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    log = (folder / "log" / "workerlog.0").read_text()
    assert process.returncode == 0, log + (folder / "log" / "workerlog.1").read_text()
    return [line for line in log.splitlines() if line.startswith("norm ")]


@pytest.fixture(scope="module")
@starts_processes
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return two_ranks(tmp_path_factory.mktemp("plain"), "0", "{}")


@pytest.mark.slow
def test_ranks_wait_for_one_that_is_later_than_gloo_allows(tmp_path, plain):
    assert two_ranks(tmp_path, str(LATE_S), "{}") == plain


def test_a_second_run_gives_the_same_bits(tmp_path, plain):
    assert len(plain) == 2
    assert two_ranks(tmp_path, "0", "{}") == plain


@pytest.mark.parametrize(
    "options",
    [{"fuse": False}, {"bucket_mb": 1, "last_bucket_mb": 0.1}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options)),
)
def test_how_gradients_are_bundled_changes_nothing_on_two_ranks(tmp_path, plain, options):
    assert two_ranks(tmp_path, "0", repr(options)) == plain


@pytest.mark.parametrize(("rank", "port", "closed"), [(0, 7, [7]), (1, 7, []), (0, None, [])])
def test_rank_0_closes_the_port_of_the_store_once_all_ranks_are_connected(rank, port, closed, monkeypatch):
    from mtrain.backends._paddle import job

    order: list[Any] = []
    monkeypatch.setattr(job.internals, "port_of_store", lambda environ: port)
    monkeypatch.setattr(job.internals, "close_port", order.append)
    channel: Any = SimpleNamespace(all_gather=lambda value: order.append("all are connected"))
    job._close_store_port(channel, rank)
    assert order == ["all are connected", *closed]
