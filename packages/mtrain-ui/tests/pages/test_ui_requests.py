"""`mtrain ui` under requests that no browser of a friend would make, and over folders that no job would leave."""

import http.client
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from tests.pages.folders import evaluation, records, start, update, write_run

from mtrain.commands import main
from mtrain.records import history as history_module
from mtrain_ui.pages import overview as overview_module
from mtrain_ui.pages.content import age, moment
from mtrain_ui.pages.folder import Absent, RunFiles, Runs, readable
from mtrain_ui.pages.overview import HEAD_BYTES, TAIL_BYTES, Overview
from mtrain_ui.pages.state import state_of
from mtrain_ui.pages.timeline import MAX_ROWS, Follower

pytestmark = pytest.mark.smoke

SECRET = "the secret of another folder"


def fetch(address: str, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Request a path as it is written, which a browser would tidy up first."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host or parts.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode("utf-8"), {k.lower(): v for k, v in answer.getheaders()}
    connection.close()
    return found


@pytest.fixture(scope="module")
def filled(runs):
    """The folder of runs, with a run, a nested run, and everything that leads out of the folder."""
    secret = write_run(runs.parent / "secret")
    (secret / "logs/rank-0.log").write_text(SECRET)
    (secret / "spec.yml").write_text(SECRET)
    run = write_run(runs / "good", environment={"host": "x"})
    write_run(runs / "sweep/trial 1%2f")
    (runs / "linked").symlink_to(secret)
    (run / "logs/linked.log").symlink_to(secret / "logs/rank-0.log")
    (run / "logs/pipe.log").mkdir()
    os.mkfifo(run / "logs/waits.log")
    write_run(runs / "spec-link")
    (runs / "spec-link/spec.yml").unlink()
    (runs / "spec-link/spec.yml").symlink_to(secret / "spec.yml")
    return runs


@pytest.mark.parametrize("kind", ["run", "live", "log", "report"])
@pytest.mark.parametrize(
    "name",
    [
        "../secret", "..%2fsecret", "%2e%2e/secret", "%2e%2e%2fsecret", "good/../../secret", "good/%2e%2e/%2e%2e/secret",
        "/etc", "%2fetc", "linked", "linked/", "./good", "good/", "good%00", "good/logs", "", ".", "..", "%ff%fe", "x" * 3000,
        "..%252fsecret", "..%5csecret", "sweep", "missing",
    ],
)  # fmt: skip
def test_only_runs_of_the_folder_are_shown(address, filled, kind, name):
    status, text, _ = fetch(address, f"/{kind}/{name}?file=rank-0.log")
    assert status == 404
    assert SECRET not in text


@pytest.mark.parametrize(
    "file",
    [
        "linked.log",
        "pipe.log",
        "waits.log",
        "../spec.yml",
        "..%2fspec.yml",
        "/etc/passwd",
        "",
        "rank-1.log",
        "rank-0.log%00",
    ],
)
def test_only_logs_of_the_run_are_shown(address, filled, file):
    status, text, _ = fetch(address, f"/log/good?file={file}")
    assert status == 404
    assert SECRET not in text


def test_a_link_in_a_run_that_leaves_it_is_not_followed(address, filled):
    for kind in ("run", "report"):
        status, text, _ = fetch(address, f"/{kind}/spec-link")
        assert status == 200
        assert SECRET not in text


def test_runs_are_shown_with_what_they_have(address, filled):
    nested = quote("sweep/trial 1%2f")
    status, text, headers = fetch(address, "/")
    assert (status, "good" in text, f"/run/{nested}" in text, "linked" in text) == (200, True, True, False)
    assert "script-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert fetch(address, f"/run/{nested}")[0] == 200
    assert fetch(address, "/log/good?file=rank-0.log")[1] == "first line\nsecond line\n"
    assert "learning rate" in fetch(address, "/report/good")[1]
    assert fetch(address, "/assets/ui.js")[2]["content-type"].startswith("text/javascript")
    assert fetch(address, "/assets/../app.py")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "", "[evil]:1"]
)
def test_requests_that_name_another_host_are_refused(address, filled, host):
    connection_host = host or " "
    status, text, _ = fetch(address, "/", host=connection_host)
    assert status in (400, 421)
    assert "good" not in text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:99", "localhost.", "[::1]:8600", "10.1.2.3:80", socket.gethostname()]
)
def test_addresses_and_names_of_this_host_are_accepted(address, filled, host):
    assert fetch(address, "/", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(address, filled, method):
    before = sorted(path for path in filled.rglob("*"))
    assert fetch(address, "/run/good", method=method)[0] == 405
    assert sorted(path for path in filled.rglob("*")) == before


def test_a_comparison_needs_two_to_eight_runs(address, filled):
    assert fetch(address, "/compare?run=good")[0] == 400
    assert fetch(address, "/compare")[0] == 400
    assert fetch(address, "/compare?" + "&".join(f"run=a{i}" for i in range(9)))[0] == 400
    assert fetch(address, "/compare?run=good&run=../secret")[0] == 404
    assert fetch(address, "/compare?run=good&run=spec-link")[0] == 200


@pytest.mark.parametrize(
    "damage",
    [
        {"metrics.jsonl": b""},
        {"metrics.jsonl": b"\x00" * 100, "spec.json": b"[1", "summary.json": b"nul"},
        {"metrics.jsonl": b'{"kind":"update","update":1e999,"losses":{"total":NaN}}\n' * 5, "spec.json": b"[]"},
        {"metrics.jsonl": b"[" * 100000, "spec.json": b"[" * 100000, "environment.json": b"7"},
        {"metrics.jsonl": b'{"kind":"start","total_updates":-3}\n{"kind":"update","update":7}\n', "summary.json": b'{"best":3}'},
        {"spec.yml": b"\xff\xfe\x00" * 1000, ".lock-0": b"99999999999999999999", "failures/rank-0.json": b"{"},
        {"metrics.jsonl": b'{"kind":"end","reason":"done","updates":"x"}', "environment.json": b'{"argv":{"a":1},"versions":[1]}'},
    ],
)  # fmt: skip
def test_damaged_folders_do_not_spoil_the_pages(address, filled, damage):
    broken = write_run(filled / "broken")
    try:
        (broken / "failures").mkdir()
        for name, content in damage.items():
            (broken / name).write_bytes(content)
        paths = ("/", "/rows", "/run/broken", "/live/broken", "/report/broken", "/compare?run=broken&run=good")
        assert [fetch(address, path)[0] for path in paths] == [200] * 6
    finally:
        shutil.rmtree(broken)


def test_of_a_huge_log_the_end_is_shown(address, filled):
    log = filled / "good/logs/rank-1.log"
    log.write_bytes(b"x" * 79 + b"\n")
    with log.open("r+b") as file:
        file.truncate(3 << 30)  # a file with a hole takes no space
        file.seek(0, 2)
        file.write(b"\nthe last line\n")
    status, text, _ = fetch(address, "/log/good?file=rank-1.log")
    log.unlink()
    assert status == 200
    assert len(text) < 70_000
    assert text.endswith("the last line\n")
    assert "are not shown" in text


# ----------------------------------------------------------------------------------------------------- without a server
def test_wrong_use_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            ("missing",): "no such folder", ("file",): "is a file", (".", "--port", port): "in use",
            (".", "--host", "256.1.1.1", "--port", "0"): "--host 256.1.1.1",
            (".", "--host", "203.0.113.7", "--port", "0"): "--host 203.0.113.7",
        }  # fmt: skip
        monkeypatch.chdir(tmp_path)
        for arguments, reason in wrong.items():
            assert main(["ui", *arguments]) == 2
            error = capsys.readouterr().err
            assert reason in error
            assert "Traceback" not in error
    assert main(["ui", "--port", "70000"]) == 2
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["ui", "."]) == 2
    assert "mtrain-ui" in capsys.readouterr().err


def test_new_lines_are_read_once_they_are_whole(tmp_path):
    run = write_run(tmp_path / "run", [start(), update(0)])
    follower = Follower(Runs(tmp_path).run("run"))
    assert len(follower.refresh().updates) == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "update", "update": 1, "lo')
        file.flush()
        assert len(follower.refresh().updates) == 1
        file.write('sses": {"total": 1.0}}\n')
    assert [record["update"] for record in follower.refresh().updates] == [0, 1]


def test_a_file_that_begins_anew_is_read_anew(tmp_path):
    run = write_run(tmp_path / "run", records(50))
    follower = Follower(Runs(tmp_path).run("run"))
    assert len(follower.refresh().updates) == 50
    write_run(run, [start(), update(0)])
    assert len(follower.refresh().updates) == 1


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    lines = [start(), *(update(i, gradient_norm=1.0) for i in range(10)), evaluation(5, 0.1), evaluation(10, 0.9)]
    lines += [start(update=5), *(update(i, gradient_norm=2.0) for i in range(5, 8))]
    write_run(tmp_path / "run", lines)
    timeline = Follower(Runs(tmp_path).run("run")).refresh()
    assert [record["gradient_norm"] for record in timeline.updates] == [1.0] * 5 + [2.0] * 3
    assert [record["update"] for record in timeline.evaluations] == [5]


def test_a_long_run_is_kept_in_bounded_memory_from_its_beginning_to_its_end(tmp_path):
    write_run(tmp_path / "run", [start(), *(update(i) for i in range(3 * MAX_ROWS))])
    x, _ = Follower(Runs(tmp_path).run("run")).refresh().column("gradient_norm")
    assert len(x) <= MAX_ROWS
    assert (x[0], x[-1] > 3 * MAX_ROWS - 10) == (0, True)
    assert set(np.diff(x)) == {4}, "as far from each other at the end as at the beginning"


@pytest.mark.parametrize(
    ("reason", "state"),
    [("done", "finished"), ("interrupted", "interrupted"), ("failed", "failed"), (None, "unfinished")],
)
def test_states_of_runs_that_ended_long_ago(tmp_path, reason, state):
    run = write_run(tmp_path / "run", records(5, reason=reason))
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    assert Overview(Runs(tmp_path)).entries()[0].state == state


def test_a_run_is_running_while_the_process_that_holds_it_exists(tmp_path):
    run = write_run(tmp_path / "run", records(5, reason=None))
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    files = Runs(tmp_path).run("run")
    (run / ".lock-0").write_text(f"{os.getpid()}\n")
    assert state_of(files, None) == "running"
    os.utime(run / ".lock-0", (1e9, 1e9))  # this process began later: it is another one with the same number
    assert state_of(files, None) == "unfinished"


def test_the_newest_run_comes_first_and_keeps_its_best_metric(tmp_path):
    write_run(tmp_path / "old", records(5, score=0.5))
    write_run(tmp_path / "new", [start(time=2e9), update(0), evaluation(1, 0.8), evaluation(2, 0.3)])
    entries = Overview(Runs(tmp_path)).entries()
    assert [(entry.name, entry.metric, entry.value) for entry in entries] == [
        ("new", "accuracy", "0.8000"),
        ("old", "accuracy", "0.5000"),
    ]


def test_the_list_counts_the_updates_that_were_made(tmp_path):
    write_run(tmp_path / "going", [start(time=3e9), *(update(number) for number in range(15))])
    write_run(
        tmp_path / "ended",
        [
            start(time=2e9),
            update(0),
            update(40),
            {"kind": "end", "time": 2e9 + 60, "reason": "interrupted", "updates": 45},
        ],
    )
    write_run(tmp_path / "begun", [start(time=1e9)])
    entries = Overview(Runs(tmp_path)).entries()
    assert [(entry.name, entry.updates, entry.share) for entry in entries] == [
        ("going", "15 of 60", 25),
        ("ended", "45 of 60", 75),
        ("begun", "", 0),
    ]


def test_colours_and_progress_bars_of_logs_become_plain_lines():
    assert readable(b"\x1b[31mred\x1b[0m\r\n10%\r100%\n\xff\x07") == "red\n100%\n�"


def test_a_name_that_is_no_text_is_no_run(tmp_path):
    write_run(tmp_path / "good")
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(folder)
    with open(folder + b"/metrics.jsonl", "wb"):
        pass
    runs = Runs(tmp_path)
    assert runs.names() == ["good"]
    with pytest.raises(Absent):
        runs.run("good\0")


@pytest.mark.job
@pytest.mark.parametrize("request_to_end", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_asked_to_end_has_ended_well(request_to_end, tmp_path):
    """As `mtrain serve` does: a service manager would report any other exit code as a failure."""
    line = [sys.executable, "-m", "mtrain", "ui", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "http://127.0.0.1:" in first
    address = urlsplit(first.partition("http://")[2].partition(" ")[0].join(("http://", "")))
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", "/")  # it answers, so its handlers of signals are set
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(request_to_end)
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)


def test_a_request_whose_length_is_given_twice_ends_its_connection(address, filled):
    parts = urlsplit(address)
    twice = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(twice + b"GET /run/good HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"HTTP/1.1 200" not in received


def test_the_list_shows_how_a_run_went_when_it_began_and_how_long_it_still_takes(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain_ui.pages.overview.time.time", lambda: 3e9 + 400)
    going = [start(time=3e9, total_updates=1000), *(update(number, update_seconds=0.5) for number in range(100))]
    run = write_run(tmp_path / "going", [*going, evaluation(50, 0.25), evaluation(100, 0.75)])
    (run / ".lock-0").write_text(f"{os.getpid()}\n")
    write_run(tmp_path / "begun", [start(time=2e9), update(0)])
    write_run(tmp_path / "unscored", [start(time=1e9), update(0, losses={"total": 4.0}), update(9)])
    entries = {entry.name: entry for entry in Overview(Runs(tmp_path)).entries()}
    assert (entries["going"].age, entries["going"].left) == ("6 min ago", "7 min 30 s left"), "900 updates of 0.5 s"
    assert "accuracy: 0.25 after update 50, 0.75 after update 100" in entries["going"].curve
    assert entries["going"].curve.count("L") == 1, "a line of two points"
    assert "total loss: 4 after update 0" in entries["unscored"].curve
    assert (entries["begun"].curve, entries["begun"].left) == ("", "")
    assert entries["begun"].age == entries["begun"].started[:10], "long ago: a date"


def test_evaluations_are_found_in_the_middle_of_a_long_file(tmp_path):
    lines: list = [start(time=3e9, total_updates=9000)]
    for number in range(9000):
        lines += [update(number)] + ([evaluation(number + 1, number / 9000)] if number % 1000 == 999 else [])
    run = write_run(tmp_path / "long", lines)
    assert (run / "metrics.jsonl").stat().st_size > HEAD_BYTES + 2 * TAIL_BYTES
    (entry,) = Overview(Runs(tmp_path)).entries()
    assert entry.curve.count("L") == 8, "nine evaluations"
    assert entry.value == f"{8999 / 9000:.4f}"
    assert entry.updates == "9000 of 9000"


@pytest.mark.parametrize(
    ("passed", "words"),
    [(0, "just now"), (59, "just now"), (60, "1 min ago"), (7199, "1 h ago"), (90_000, "1 d ago"), (-5, None)],
)
def test_times_are_told_by_their_age(passed, words):
    now = 1.8e9
    assert age(now - passed, now=now) == (words or moment(now - passed)[:10])
    assert age("soon", now=now) is None


# ------------------------------------------------------------------------------------------------------------- many runs
def test_of_many_runs_the_newest_are_listed_and_all_on_request(tmp_path, monkeypatch):
    from starlette.testclient import TestClient

    from mtrain_ui.pages import app

    monkeypatch.setattr(app, "MAX_LISTED", 3)
    for number in range(7):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(start(time=1_700_000_000.0 + number)) + "\n")
    client = TestClient(app.application(Runs(tmp_path), host="testserver"))
    page, everything = client.get("/").text, client.get("/?all").text
    assert re.findall(r'data-key="(run\d)"', page) == ["run6", "run5", "run4"]
    assert "newest 3 of 7 runs" in page
    assert re.findall(r'data-key="(run\d)"', client.get("/rows").text) == ["run6", "run5", "run4"]
    assert len(re.findall(r'data-key="(run\d)"', everything)) == 7
    assert 'data-poll="/rows?all"' in everything
    assert len(re.findall(r'data-key="(run\d)"', client.get("/rows?all").text)) == 7


def test_the_first_page_of_many_runs_reads_those_that_it_lists_alone(tmp_path, monkeypatch):
    for number in range(30):
        write_run(tmp_path / f"run{number}")
        for path in (tmp_path / f"run{number}/metrics.jsonl", tmp_path / f"run{number}"):
            os.utime(path, (1_700_000_000 + number,) * 2)
    (tmp_path / "begins").mkdir()
    (tmp_path / "begins/spec.json").write_text("{}")
    overview, read = Overview(Runs(tmp_path)), []
    real = overview_module._ends
    monkeypatch.setattr(overview_module, "_ends", lambda run: read.append(run.path.name) or real(run))
    assert len(overview.entries(most=4)) == 4
    assert sorted(read) == ["begins", "run27", "run28", "run29"], "one without records yet is new, too"
    assert overview.total == 31
    os.utime(tmp_path / "run3/metrics.jsonl")
    overview.entries(most=4)
    assert read[4:] == ["run3"]
    assert len(overview.entries()) == 31
    monkeypatch.setattr(overview_module, "WAIT_S", 0.01)
    with overview._lock:  # another thread reads
        assert len(overview.entries(most=4)) == 4, "of all that were read before"


def test_a_run_that_has_not_changed_is_not_read_again_and_one_that_has_is(tmp_path, monkeypatch):
    for number in range(5):
        write_run(tmp_path / f"run{number}")
    overview, read = Overview(Runs(tmp_path)), []
    real = overview_module._ends
    monkeypatch.setattr(overview_module, "_ends", lambda run: read.append(run.path.name) or real(run))
    assert len(overview.entries()) == 5
    assert sorted(read) == [f"run{number}" for number in range(5)]
    before = {entry.name: entry for entry in overview.entries()}
    with (tmp_path / "run2" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(start(model="another")) + "\n")
    after = {entry.name: entry for entry in overview.entries()}
    assert read[5:] == ["run2"]
    assert (before["run2"].model, after["run2"].model) == ("vit", "another")
    assert all(after[name] == before[name] for name in before if name != "run2")


def test_what_is_kept_of_a_run_does_not_grow_with_its_records(tmp_path):
    """The list keeps one line of each run, whatever its file holds."""
    sizes = {}
    for updates in (10, 1000):
        root = tmp_path / str(updates)
        write_run(root / "run", [start(), *map(update, range(updates)), evaluation(updates, 0.5)])
        overview = Overview(Runs(root))
        overview.entries()
        sizes[updates] = len(pickle.dumps(overview._kept))
    assert sizes[1000] < 1.2 * sizes[10] + 3000, "a small curve of 48 points at most"


def test_the_end_of_a_very_long_run_is_read(tmp_path, monkeypatch):
    """Updates that no curve keeps are not parsed, and the end of the file is reached."""
    lines = [
        start(total_updates=60_000),
        *map(update, range(60_000)),
        evaluation(60_000, 0.9),
        {"kind": "end", "reason": "done"},
    ]
    run = write_run(tmp_path / "run", lines)
    parsed = []
    real = history_module.parse_json
    monkeypatch.setattr(history_module, "parse_json", lambda line: parsed.append(1) or real(line))
    timeline = Follower(RunFiles(run)).refresh()
    assert timeline.end is not None
    assert len(timeline.updates) <= MAX_ROWS
    assert timeline.last_update["update"] >= 60_000 - timeline.stride
    assert len(parsed) < 25_000


@pytest.mark.parametrize(
    ("host", "age_s", "expected"),
    [
        ("elsewhere", 200.0, "running"),
        ("elsewhere", 400.0, "unfinished"),
        ("", 50.0, "running"),
        ("", 200.0, "unfinished"),
    ],
)
def test_a_run_of_another_host_has_more_time_until_it_counts_as_ended(tmp_path, host, age_s, expected) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"host": host or socket.gethostname()}))
    (tmp_path / "metrics.jsonl").write_text("")
    os.utime(tmp_path / "metrics.jsonl", (1000.0, 1000.0))
    assert state_of(RunFiles(tmp_path), None, now=1000.0 + age_s) == expected
