"""The progress of a TrainJob reaches Kubeflow's status server, here one on loopback over HTTPS, and never harms the job."""

import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.core.interfaces.reporter import ReportedRun, Reporter
from mtrain_clusters import kubeflow_reporter as kubeflow
from mtrain_clusters.kubeflow_reporter import server_of
from tests.starts import starts_processes


@dataclass
class Kubeflow:
    """What a status server was sent."""

    folder: Path
    port: int = 0
    code: int = 200
    statuses: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def environ(self) -> dict[str, str]:
        path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/first/status"
        return {
            kubeflow.URL: f"https://localhost:{self.port}{path}",
            kubeflow.CERTIFICATE: str(self.folder / "ca.crt"),
            kubeflow.TOKEN: str(self.folder / "token"),
        }


@pytest.fixture
def reporter(monkeypatch, tmp_path) -> Callable[..., kubeflow.Kubeflow]:
    """Makes a reporter in an environment that names a server."""

    def make(server: Kubeflow, *, interval_s: float = 0.0, **other: str) -> kubeflow.Kubeflow:
        for name, value in {**server.environ(), **other}.items():
            monkeypatch.setenv(name, value)
        run = ReportedRun(folder=tmp_path, rank=0, size=1, start_update=0, spec={})
        return kubeflow.Kubeflow(Reporter.Options(), run, interval_s=interval_s)

    return make


@pytest.fixture(scope="module")
@starts_processes
def certificate(tmp_path_factory) -> Path:
    return _certificate(tmp_path_factory.mktemp("certificate"))


def _certificate(folder: Path) -> Path:
    words = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.crt")]
    subprocess.run(["openssl", "req", *words.split(), *files], check=True, capture_output=True)
    (folder / "token").write_text("first\n")
    return folder


@contextmanager
def _served(folder: Path) -> Iterator[Kubeflow]:
    state = Kubeflow(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path.endswith("/namespaces/team/trainjobs/first/status")
            state.statuses.append(json.loads(body))
            state.tokens.append(self.headers["Authorization"])
            state.times.append(time.monotonic())
            self.send_response(state.code)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server(certificate) -> Iterator[Kubeflow]:
    with _served(certificate) as state:
        yield state


def _record(update: int, *, total: int | None = 10, **losses: float) -> dict[str, Any]:
    return {
        "update": update,
        "total_updates": total,
        "losses": {"total": 1.5, **losses},
        "learning_rate": 0.01,
        "kind": "update",
    }


def _metrics(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["trainerStatus"]["metrics"]}


@pytest.mark.smoke
def test_the_status_is_one_that_kubeflows_model_reads_whole(server, reporter):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the extra kube is not installed")
    report = reporter(server, interval_s=0.0)
    for update in range(4):
        report.update(_record(update, box=0.25, obj=float("nan")))
        time.sleep(0.1)
    report.evaluation({"metrics": {"AP": 0.5}, "update": 4, "epoch": 0})
    report.update(_record(4))
    report.end({"reason": "done"})
    for status in server.statuses:
        read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(status)
        assert set(read.to_dict()["trainerStatus"]) == set(status["trainerStatus"])
    first, last = server.statuses[0], server.statuses[-1]
    assert first["trainerStatus"]["progressPercentage"] == 10
    assert _metrics(first) == {"loss/total": "1.5", "loss/box": "0.25", "learning_rate": "0.01"}
    assert (last["trainerStatus"]["progressPercentage"], last["trainerStatus"]["estimatedRemainingSeconds"]) == (100, 0)
    assert _metrics(last)["metric/AP"] == "0.5"


def _until_sent(server: Kubeflow, count: int) -> None:
    """Wait until the server has so many statuses."""
    deadline = time.monotonic() + 30
    while len(server.statuses) < count:
        assert time.monotonic() < deadline, server.statuses
        time.sleep(0.01)


@pytest.mark.smoke
def test_the_seconds_left_follow_from_the_updates_of_this_process(server, reporter, monkeypatch):
    """Four updates in 8 s of a job that was resumed at update 50; 45 of 100 are left."""
    now = [1000.0]
    monkeypatch.setattr(kubeflow, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = reporter(server)
    report.update(_record(50, total=100))
    now[0] += 8.0
    report.update(_record(54, total=100))
    report.end({"reason": "interrupted"})
    last = server.statuses[-1]["trainerStatus"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (55, 90)


@pytest.mark.smoke
def test_the_last_status_has_the_losses_and_the_last_evaluation(server, reporter):
    """Kubeflow puts each status in the place of the one before: a metric that the last one lacks is gone."""
    report = reporter(server)
    report.update(_record(9, box=0.25))
    _until_sent(server, 1)  # nothing waits any more when the evaluation comes
    report.evaluation({"metrics": {"AP": 0.5}, "update": 10, "epoch": 1})
    _until_sent(server, 2)
    report.end({"reason": "done", "last": {"AP": 0.5, "update": 10, "epoch": 1}})
    assert _metrics(server.statuses[-1]) == {
        "loss/total": "1.5",
        "loss/box": "0.25",
        "learning_rate": "0.01",
        "metric/AP": "0.5",
    }
    assert server.statuses[-1]["trainerStatus"]["progressPercentage"] == 100


@pytest.mark.smoke
@pytest.mark.parametrize("reason", ["interrupted", "failed"])
def test_an_evaluation_after_the_last_update_is_sent_however_the_job_ends(server, reporter, reason):
    report = reporter(server)
    report.update(_record(4))
    _until_sent(server, 1)
    report.evaluation({"metrics": {"AP": 0.5}, "update": 5, "epoch": 0})
    report.end({"reason": reason})
    assert _metrics(server.statuses[-1])["metric/AP"] == "0.5"
    assert server.statuses[-1]["trainerStatus"]["progressPercentage"] == 50


@pytest.mark.smoke
def test_a_resumed_job_with_nothing_left_to_do_keeps_the_metrics_of_its_checkpoint(server, reporter):
    reporter(server).end({"reason": "done", "last": {"AP": 0.5, "update": 10, "epoch": 1}})
    assert [_metrics(status) for status in server.statuses] == [{"metric/AP": "0.5"}]


@pytest.mark.smoke
def test_a_job_that_is_ended_is_not_complete(server, reporter):
    report = reporter(server, interval_s=0.0)
    report.update(_record(9))
    time.sleep(0.3)
    report.end({"reason": "interrupted"})
    assert [status["trainerStatus"]["progressPercentage"] for status in server.statuses] == [99]


@pytest.mark.smoke
def test_requests_keep_their_interval_and_the_newest_status_is_sent(server, reporter):
    report = reporter(server, interval_s=1.0)
    for update in range(100):
        report.update(_record(update, total=100))
        time.sleep(0.015)
    report.end({"reason": "done"})
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:-1], strict=False)]
    assert 2 <= len(server.statuses) <= 5
    assert min(gaps, default=1.0) > 0.5
    assert server.statuses[-1]["trainerStatus"]["progressPercentage"] == 100


@pytest.mark.smoke
def test_a_token_that_was_renewed_is_read_again(server, reporter, certificate):
    report = reporter(server)
    for token in ("first", "second"):
        (certificate / "token").write_text(token)
        report.update(_record(1))
        time.sleep(0.5)
    report.failure({"reason": "failed"})
    assert server.tokens == ["Bearer first", "Bearer second"]


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["nobody", "refusing", "no token", "another certificate", "silent"])
def test_a_server_that_fails_costs_one_warning_and_no_more_than_its_time(
    server, reporter, certificate, tmp_path, monkeypatch, caplog, fault
):
    monkeypatch.setattr(kubeflow, "TIMEOUT_S", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))
    if fault == "refusing":
        server.code = 500
    if fault in ("nobody", "silent"):
        server.port = silent.getsockname()[1]
    if fault == "nobody":
        silent.close()
    other = {"no token": {kubeflow.TOKEN: str(tmp_path / "absent")}}
    if fault == "another certificate":
        other[fault] = {kubeflow.CERTIFICATE: str(_certificate(tmp_path) / "ca.crt")}
    report = reporter(server, **other.get(fault, {}))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for update in range(3):
            report.update(_record(update))
            time.sleep(0.2)
        report.end({"reason": "done"})
    silent.close()
    assert time.monotonic() - began < 10
    assert [entry.message.partition(":")[0] for entry in caplog.records] == [
        "the progress cannot be sent to Kubeflow, and the job goes on without"
    ]


@pytest.mark.smoke
def test_without_kubeflows_variables_nothing_is_started(server):
    assert server_of(server.environ()) is not None
    for name in server.environ():
        assert server_of({key: value for key, value in server.environ().items() if key != name}) is None
    plain = {**server.environ(), kubeflow.URL: "http://localhost/status"}  # the token would be readable on the way
    assert server_of(plain) is None


def test_a_job_sends_its_progress(server, tmp_path, monkeypatch):
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    values = [
        "train.epochs=null",
        "train.updates=2",
        "data.image_size=64",
        "evaluate.at_end=false",
        "report.plots=false",
    ]
    values += ["report.tensorboard=false", "report.reporters.kubeflow=true"]
    argv = [sys.executable, "-m", "mtrain", "train", "-c", "digits", "-b", "solo", "-o", *values]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert server.statuses[-1]["trainerStatus"]["progressPercentage"] == 100
    assert "loss/total" in _metrics(server.statuses[-1])
    assert all(token.startswith("Bearer ") for token in server.tokens)
