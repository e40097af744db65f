"""The metrics of a host's ranks as Prometheus reads them."""

import http.client
import json
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.core.record_files import live_file
from mtrain.errors import UsageError
from mtrain.jobs.run import metrics, metrics_server
from mtrain.jobs.run.host_collector import HostCollector
from mtrain.jobs.run.metrics import HostMetrics
from mtrain.jobs.run.metrics_place import AttemptFacts, MetricsPlace
from mtrain.jobs.run.metrics_server import MAX_REQUESTS
from mtrain.records.live import LiveFigures
from tests.ports import held_port

ROOT = Path(__file__).parents[2]
UPDATE = {
    "kind": "update",
    "time": 1000.0,
    "update": 41,
    "epoch": 3,
    "losses": {"total": 1.5, "box": 0.5},
    "learning_rate": 0.01,
    "gradient_norm": 2.0,
    "samples_per_second": 64.0,
    "mfu": 0.375,
    "update_seconds": 0.25,
    "skipped_updates": 1,
    "total_updates": 100,
    "data_wait_share": 0.125,
    "memory_bytes": 4096,
    "communication_s": 7.0,
}
WHOLE = AttemptFacts(hosts=3, restarts=2, ranks=range(2, 4))


def rank_of(folder: Path, rank: int, **more: object) -> LiveFigures:
    run = ReportedRun(folder=folder, rank=rank, size=6, start_update=0, spec={})
    return LiveFigures({}, run, **more)


def read(folder: Path, facts: AttemptFacts, *, now: float = 1005.0, began: float = 900.0) -> dict[str, float]:
    """Metrics of a host by name and labels, as a registry collects them."""
    collector = HostCollector(folder, facts=lambda: facts, began=began, clock=lambda: now)
    return {
        f"{sample.name} {' '.join(f'{key}={value}' for key, value in sorted(sample.labels.items()) if key != 'run')}".rstrip(): (
            sample.value
        )
        for family in collector.collect()
        for sample in family.samples
    }


def test_a_host_tells_the_metrics_of_its_ranks_and_those_of_the_job(tmp_path):
    clock = iter([0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 30.0, 40.0])
    second = rank_of(tmp_path, 3)
    second.update({**UPDATE, "time": 998.0, "update": 40, "memory_bytes": 1024})
    first = rank_of(tmp_path, 2, clock=lambda: next(clock))
    first.start({"kind": "start", "backend": "ddp", "model": "yolov5n", "total_updates": 100})
    first.update(UPDATE)
    first.update({**UPDATE, "communication_s": 9.0})
    first.evaluation({"kind": "evaluation", "time": 1001.0, "metrics": {"map": 0.25, "map/cat": 0.5}})
    first.checkpoint({"kind": "checkpoint", "update": 40})
    assert read(tmp_path, WHOLE) == {
        "mtrain_job_info backend=ddp model=yolov5n": 1.0,
        "mtrain_restarts_total": 2.0,
        "mtrain_job_failed": 0.0,
        "mtrain_hangs": 0.0,
        "mtrain_hosts": 3.0,
        "mtrain_ranks": 2.0,
        "mtrain_update": 42.0,
        "mtrain_total_updates": 100.0,
        "mtrain_epoch": 3.0,
        "mtrain_learning_rate": 0.01,
        "mtrain_gradient_norm": 2.0,
        "mtrain_samples_per_second": 64.0,
        "mtrain_mfu": 0.375,
        "mtrain_update_seconds": 0.25,
        "mtrain_data_wait_share": 0.125,
        "mtrain_skipped_updates": 1.0,
        "mtrain_checkpoint_update": 40.0,
        "mtrain_loss loss=total": 1.5,
        "mtrain_loss loss=box": 0.5,
        "mtrain_metric metric=map": 0.25,
        "mtrain_memory_bytes rank=2": 4096.0,
        "mtrain_memory_bytes rank=3": 1024.0,
        "mtrain_communication_share rank=2": 0.2,
        "mtrain_seconds_since_update rank=2": 4.0,
        "mtrain_seconds_since_update rank=3": 7.0,
    }


def test_a_rank_that_has_done_nothing_yet_is_counted_from_the_beginning_of_the_job(tmp_path):
    values = read(tmp_path, WHOLE, now=930.0)
    assert (values["mtrain_seconds_since_update rank=2"], values["mtrain_hosts"]) == (30.0, 3.0)
    assert "mtrain_update" not in values


def test_values_that_are_no_numbers_reach_prometheus(tmp_path):
    rank_of(tmp_path, 2).update({**UPDATE, "losses": {"total": math.nan, "box": math.inf}, "gradient_norm": -math.inf})
    values = read(tmp_path, WHOLE)
    assert math.isnan(values["mtrain_loss loss=total"])
    assert (values["mtrain_loss loss=box"], values["mtrain_gradient_norm"]) == (math.inf, -math.inf)


def test_a_rank_writes_at_most_twice_a_second_and_its_last_words_at_once(tmp_path):
    now = [10.0]
    rank = rank_of(tmp_path, 0, clock=lambda: now[0])
    for update in range(5):
        rank.update({**UPDATE, "update": update})
        now[0] += 0.1
    written = json.loads(live_file(tmp_path, 0).read_text())["update"]
    rank.failure({"kind": "end", "reason": "failed", "time": 1000.0})
    assert (written, json.loads(live_file(tmp_path, 0).read_text())["update"]) == (1, 5)


def test_waiting_for_other_ranks_in_an_evaluation_is_no_communication_of_updates(tmp_path):
    """The running total grows by 2 s in 10 s of updates, by 15 s around an evaluation, and by 4 s in 10 s after it."""
    now, shares = [0.0], []
    rank = rank_of(tmp_path, 0, clock=lambda: now[0])
    for at, total, evaluates in ((0.0, 1.0, False), (10.0, 3.0, True), (30.0, 18.0, False), (40.0, 22.0, False)):
        now[0] = at
        rank.update({**UPDATE, "communication_s": total})
        shares.append(json.loads(live_file(tmp_path, 0).read_text()).get("communication_share"))
        if evaluates:
            rank.evaluation({"kind": "evaluation", "time": 1001.0, "metrics": {}})
    assert shares == [None, 0.2, 0.2, 0.4]


# -------------------------------------------------------------------------------------------------------------- server
def scraped(port: int, address: str = "127.0.0.1") -> Mapping[str, float]:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_outlive_an_attempt_and_a_new_job_does_not_show_those_of_the_former(tmp_path):
    port = held_port()
    rank_of(tmp_path, 0).update(UPDATE)
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=port, address="127.0.0.1"), tmp_path)
        host.begin(AttemptFacts(hosts=1, restarts=0, ranks=range(1)))
        assert "mtrain_update" not in scraped(port), "left by an earlier job in this folder"
        rank_of(tmp_path, 0).update(UPDATE)
        host.begin(AttemptFacts(hosts=1, restarts=1, ranks=range(1)))
        values = scraped(port)
        assert (values["mtrain_update"], values["mtrain_restarts_total"]) == (42.0, 1.0)
    assert not live_file(tmp_path, 0).parent.exists()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_a_job_that_fails_answers_until_its_failure_was_read(tmp_path):
    port = held_port()
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=port, address="127.0.0.1"), tmp_path)
        assert scraped(port)["mtrain_job_failed"] == 0.0
        waiting = threading.Thread(target=host.fail)
        waiting.start()
        while (told := scraped(port)["mtrain_job_failed"]) != 1.0:
            assert waiting.is_alive()
        waiting.join(60)
        assert (told, waiting.is_alive()) == (1.0, False)


def test_a_hang_is_told_until_the_ranks_go_on_or_start_again_and_a_remark_is_none(tmp_path):
    port = held_port()
    facts = AttemptFacts(hosts=1, restarts=0, ranks=range(1))
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=port, address="127.0.0.1"), tmp_path)
        told = []
        for report in ({"hang": "slow"}, {"hang": "still"}, {"over": True}, {"hang": "stopped"}):
            host.note_hang(report)
            told.append(scraped(port)["mtrain_hangs"])
        host.begin(facts)
        assert [*told, scraped(port)["mtrain_hangs"]] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_failure_waits_for_nobody_who_has_never_read_and_for_no_user_who_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "READ_S", float("inf"))
    port = held_port()
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=port, address="127.0.0.1"), tmp_path)
        host.fail()
        assert scraped(port)["mtrain_job_failed"] == 1.0
        host.fail(stop=lambda: True)


def test_a_failure_waits_for_whoever_has_read_before(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "READ_S", float("inf"))
    port, looks = held_port(), iter([False, False, True])
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=port, address="127.0.0.1"), tmp_path)
        scraped(port)
        host.fail(stop=lambda: next(looks))
    assert list(looks) == []


@contextmanager
def served(folder: Path, address: str = "127.0.0.1") -> Iterator[tuple[HostMetrics, int]]:
    with closing(HostMetrics()) as host:
        host.open(MetricsPlace(port=(port := held_port()), address=address), folder)
        yield host, port


def test_callers_that_send_nothing_or_drip_keep_no_other_from_an_answer(tmp_path):
    with served(tmp_path) as (_, port):
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_REQUESTS)]
        for each in slow[::2]:
            each.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert "mtrain_hosts" in scraped(port), "the oldest makes room"
        assert slow[0].recv(1) == b""
        assert "mtrain_hosts" in scraped(port)
        assert slow[1].recv(1) == b""
        for each in slow:
            each.close()


def test_the_address_with_the_most_connections_gives_one_up(tmp_path):
    with served(tmp_path, "0.0.0.0") as (_, port):
        first = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_REQUESTS)]
        assert crowd[0].recv(1) == b""
        first.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert first.recv(12) == b"HTTP/1.0 200"
        for each in (first, *crowd):
            each.close()


def test_a_caller_that_drips_has_no_more_time_than_one_that_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.3)
    with served(tmp_path) as (_, port), socket.create_connection(("127.0.0.1", port)) as drips:
        drips.sendall(b"GET /metrics HTTP/1.1\r\n")
        drips.settimeout(0.05)
        for _ in range(1200):
            try:
                drips.sendall(b"x")
                ended = drips.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            break
        assert ended


def asked_by(port: int, host: str | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with closing(connection):
        connection.putrequest("GET", "/metrics", skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_page_of_a_stranger_cannot_read_the_metrics_through_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Node7")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.cluster.example")
    monkeypatch.setattr(metrics, "listener_address", lambda place: "127.0.0.1")
    with served(tmp_path, "own-name-in-the-job") as (host, port):
        own = ("127.0.0.1", "[::1]", "localhost", "node7", "node7.cluster.example", "own-name-in-the-job", "192.0.2.7")
        for name in (
            "evil.example",
            "node7.evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            None,
        ):
            status, text = asked_by(port, name and f"{name}:{port}")
            assert (status, "mtrain_" in text) == (421, False), name
        asked_by(port, "localhost,evil.example")
        host.fail()  # returns at once: none of these has read the metrics
        for name in own:
            for typed in (name, f"{name.upper()}:{port}", f"{name}.:{port}"):
                assert asked_by(port, typed)[0] == 200, typed


def test_two_jobs_of_a_host_cannot_have_one_port(tmp_path):
    port = held_port()
    place = MetricsPlace(port=port, address="127.0.0.1")
    with closing(HostMetrics()) as one, closing(HostMetrics()) as other:
        one.open(place, tmp_path)
        with pytest.raises(UsageError, match=rf"report\.metrics_port: {port} is in use on 127\.0\.0\.1; give each job"):
            other.open(place, tmp_path)


def test_the_address_of_another_host_is_refused(tmp_path):
    with (
        closing(HostMetrics()) as host,
        pytest.raises(UsageError, match=r"no server can listen at 203\.0\.113\.1:9400"),
    ):
        host.open(MetricsPlace(port=9400, address="203.0.113.1"), tmp_path)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"the package prometheus_client is not installed; install it with: pip install .*"
    ):
        metrics.check_library()


# ------------------------------------------------------------------------------------------------------------- command
def train(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "mtrain", "train", "-c", "digits", "-o", f"report.dir={folder}/runs", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.job
def test_a_taken_port_is_refused_in_one_sentence_before_anything_starts(tmp_path):
    port = held_port()
    with socket.create_server(("127.0.0.1", port)):
        ended = train(tmp_path, f"report.metrics_port={port}")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(f"error: report.metrics_port: {port} is in use on 127.0.0.1; ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.job
def test_an_address_that_is_none_is_refused(tmp_path):
    ended = train(tmp_path, "report.metrics_address=all")
    assert ended.returncode == 2
    assert "address 'all': expected an IP address of the host, such as 127.0.0.1, 0.0.0.0" in ended.stderr


# --------------------------------------------------------------------------------------------------------- what is shipped
def names() -> set[str]:
    """Every metric that a host may tell, as Prometheus stores it."""
    registry = CollectorRegistry(auto_describe=False)
    collector = HostCollector(Path("run"), facts=lambda: WHOLE, began=0.0)
    registry.register(collector)
    suffix = {"counter": "_total", "info": "_info"}
    return {family.name + suffix.get(family.type, "") for family in collector.collect()}


@pytest.mark.parametrize("file", ["dashboard.json", "alerts.yml", "../monitoring.md"])
def test_what_is_shipped_names_metrics_that_exist(file):
    text = (ROOT / "docs" / "monitoring" / file).read_text()
    used = set(re.findall(r"\bmtrain_[a-z_]+", text))
    assert used
    assert used - names() == set()


def test_the_page_explains_every_metric():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert {name for name in names() if f"`{name}`" not in page and f"`{name}{{" not in page} == set()
