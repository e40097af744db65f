"""Hours of requests in little: good and hostile ones at once, again and again, and the memory stays."""

import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.serving.files import exported
from tests.serving.servers import encoded, plain, raw_answer, serving, until

pytest.importorskip("onnx", reason="the extra export is not installed")


@pytest.mark.slow
def test_memory_and_connections_stay_under_hostile_load(tmp_path):
    good = encoded(plain((255, 0, 0), width=640, height=480), ".jpg")
    with serving(exported(tmp_path / "colours.onnx", "detection"), "--max-body", "1", "--timeout", "5") as server:
        process = psutil.Process(server.process.pid)

        def request(number: int) -> None:
            kind = random.Random(number).randrange(6)
            if kind == 0:
                assert server.predict(good[: len(good) // 2]).status_code == 422
            elif kind == 1:
                assert server.predict(bytes(2_000_000)).status_code == 413
            elif kind == 2:
                with server.connected() as connection:
                    connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
            elif kind == 3:
                with server.connected() as connection:
                    connection.sendall(b"nonsense\r\n\r\n")
                    connection.recv(100)
            else:
                assert server.predict(good).status_code in (200, 503)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(request, range(600)))
            before = process.memory_info().rss
            list(pool.map(request, range(600, 3000)))
        until(lambda: server.metric("mtrain_images_in_work") == 0)
        assert process.memory_info().rss - before < 40_000_000
        until(lambda: len(process.net_connections()) < 20)
        with server.connected() as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw_answer(connection)[0] == 200
