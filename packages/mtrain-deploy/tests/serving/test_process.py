"""The life of a server: load beyond its limits, clients that go away, its end, and errors before its start."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.serving.files import exported
from tests.serving.servers import ENVIRONMENT, Server, encoded, plain, raw_answer, serving, until

pytest.importorskip("onnx", reason="the extra export is not installed")
IMAGE = encoded(plain((255, 0, 0)))
SLOW = 600
"""Convolutions that take about a second on one thread."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("slow") / "slow.onnx", "detection", rounds=SLOW)


@contextlib.contextmanager
def asked(server: Server) -> Iterator[socket.socket]:
    """Send a request, and leave its answer unread."""
    head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(IMAGE)}\r\n\r\n"
    with server.connected() as connection:
        connection.sendall(head.encode() + IMAGE)
        yield connection


@pytest.mark.job
def test_what_the_queue_cannot_take_is_told_when_to_come_again(slow):
    with serving(slow, "--queue", "2", "--max-batch", "1") as server, asked(server) as first, asked(server) as second:
        until(lambda: server.metric("mtrain_images_in_work") == 2)
        answer = server.predict(IMAGE)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "queue holds 2" in answer.json()["error"]
        assert [raw_answer(connection)[0] for connection in (first, second)] == [200, 200]
        assert server.predict(IMAGE).status_code == 200


@pytest.mark.job
def test_a_request_that_takes_too_long_is_given_up(slow):
    with serving(slow, "--max-batch", "1", "--timeout", "1") as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: server.predict(IMAGE), range(8)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) <= {200, 408, 504}
        assert 504 in statuses
        late = next(answer for answer in answers if answer.status_code == 504)
        assert "within 1 s" in late.json()["error"]
        until(lambda: server.metric("mtrain_images_in_work") == 0)
        until(lambda: server.metric("mtrain_abandoned_images_total") >= 1)


@pytest.mark.job
def test_a_client_that_went_away_costs_no_computation(slow):
    with serving(slow, "--max-batch", "1") as server, asked(server) as patient:
        until(lambda: server.metric("mtrain_images_in_work") == 1)
        with contextlib.ExitStack() as others:
            for _ in range(9):
                others.enter_context(asked(server))
            # Read in this order: an image that is done in between is missed, and never counted twice.
            until(lambda: server.metric("mtrain_images_total") + server.metric("mtrain_images_in_work") >= 10)
            computed = server.metric("mtrain_batch_size_sum")
        assert raw_answer(patient)[0] == 200
        until(lambda: server.metric("mtrain_images_in_work") == 0)
        assert server.predict(IMAGE).status_code == 200
        until(lambda: server.metric("mtrain_batch_size_sum") + server.metric("mtrain_abandoned_images_total") == 11)
        assert server.metric("mtrain_batch_size_sum") <= computed + 4


@pytest.mark.job
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_answered_before_the_end(slow, sent):
    with serving(slow, "--max-batch", "1") as server, asked(server) as first, asked(server) as second:
        until(lambda: server.metric("mtrain_images_in_work") == 2)
        server.process.send_signal(sent)
        assert [raw_answer(connection)[0] for connection in (first, second)] == [200, 200]
        assert server.process.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            server.connected()
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


def listens(server: Server) -> bool:
    try:
        server.connected().close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.job
def test_a_second_signal_ends_at_once_and_says_what_was_lost(slow):
    with serving(slow, "--max-batch", "1") as server, contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(asked(server))
        until(lambda: server.metric("mtrain_images_in_work") == 10)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not listens(server))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 1
        assert server.process.stdout is not None
        assert "requests were answered" in server.process.stdout.read()


@pytest.mark.job
def test_a_busy_port_is_one_sentence(tmp_path, capsys):
    weights = exported(tmp_path / "colours.onnx", "detection")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert failed("--weights", str(weights), "--port", str(port)) == 2
    assert capsys.readouterr().err == (
        f"error: port {port} of 127.0.0.1: Address already in use; choose another with --port; 0 takes a free one\n"
    )


@pytest.mark.job
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--weights", "none.onnx"), "none.onnx: No such file"),
        (("--weights", "."), "is not a file"),
        (("--weights", "text.onnx"), "cannot be loaded as an ONNX file"),
        (("--weights", "foreign.onnx"), "without mtrain's metadata"),
        (("--weights", "raw.onnx"), "raw outputs"),
        ((), "--weights"),
        (("--weights", "colours.onnx", "--host", "no such host"), "--host no such host"),
        (("--weights", "colours.onnx", "--host", "203.0.113.7"), "address of this machine"),
        (("--weights", "colours.onnx", "--port", "70000"), "port"),
        (("--weights", "colours.onnx", "--queue", "0"), "queue"),
        (("--weights", "colours.onnx", "--timeout", "nan"), "timeout"),
        (("--weights", "colours.onnx", "--max-batch", "0"), "max"),
        (("--weights", "colours.onnx", "--threads", "many"), "--threads"),
    ],
)
def test_errors_of_users_are_one_sentence(tmp_path, flags, words, capsys, monkeypatch):
    import onnx

    monkeypatch.chdir(tmp_path)
    for name, form in (("colours.onnx", "decoded"), ("raw.onnx", "raw")):
        exported(tmp_path / name, "detection", form=form)
    (tmp_path / "text.onnx").write_text("no model")
    model = onnx.load(tmp_path / "colours.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    assert failed(*flags) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert len([line for line in message.splitlines() if line.lower().startswith("error")]) == 1


def test_a_missing_library_names_the_package(monkeypatch):
    import importlib.util

    import mtrain
    from mtrain.errors import UsageError
    from mtrain.spec import remedies

    found = importlib.util.find_spec
    monkeypatch.setattr(remedies, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(UsageError, match=r"needs uvicorn.*packages/mtrain-deploy"):
        mtrain.serve("colours.onnx")


@pytest.mark.job
def test_python_can_serve_too_and_no_framework_is_loaded(tmp_path):
    exported(tmp_path / "colours.onnx", "detection")
    code = (
        "import mtrain, sys\n"
        "code = mtrain.serve('colours.onnx', port=0, threads=1, say=lambda line: print(line, flush=True))\n"
        "print('frameworks', sorted({'torch', 'paddle', 'onnx'} & set(sys.modules)), 'code', code)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        assert process.stdout is not None
        assert "3 classes" in process.stdout.readline()
        address = process.stdout.readline().split()[2]
        assert httpx.post(f"{address}v1/predict", content=IMAGE).status_code == 200
        process.terminate()
        assert process.stdout.read() == "frameworks [] code 0\n"
        timer.cancel()


def failed(*flags: str) -> int:
    """Run a command that starts no server, and return its exit code."""
    from mtrain.commands import main

    return main(["serve", *flags])
