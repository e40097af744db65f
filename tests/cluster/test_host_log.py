"""Hosts that come and go, as ``mtrain status`` shows them."""

from mtrain.jobs.hosts import host_log
from mtrain.jobs.hosts.host_log import FILE, HostLog, words


def test_hosts_that_were_lost_take_no_part_until_the_next_attempt(tmp_path):
    log = HostLog(tmp_path)
    assert (log.read(), words(log.read())) == ({}, [])
    log.began(["a", "b", "c"], restarts=0)
    log.lost("b", "silent for 26 s")
    assert (log.read()["hosts"], words(log.read())[0]) == (["a", "c"], "takes part: a, c")
    log.began(["a", "c"], restarts=1)
    log.began(["a", "b", "c"], restarts=2)
    found = log.read()
    assert (found["hosts"], found["restarts"], [loss["lost"] for loss in found["lost"]]) == (["a", "b", "c"], 2, ["b"])
    assert words(found)[0] == "takes part: a, b, c, started again 2 times"
    assert words(found)[1].endswith(": b: silent for 26 s")


def test_the_last_three_losses_are_told_and_damaged_lines_left_out(tmp_path):
    log = HostLog(tmp_path)
    for number in range(5):
        log.began(["a", "b"], restarts=number)
        log.lost("b", f"loss {number}")
    with (tmp_path / FILE).open("a") as file:
        file.write('7\n[1]\nnot JSON\n{"time": 1, "hos')
    assert [loss["why"] for loss in log.read()["lost"]] == ["loss 2", "loss 3", "loss 4"]
    assert words(log.read())[0] == "takes part: a, started again 4 times"


def test_a_thousand_hosts_are_one_short_line_that_says_how_many(tmp_path):
    log = HostLog(tmp_path)
    log.began([f"gpu{number}" for number in range(1000)], restarts=0)
    (line,) = words(log.read())
    assert line == "takes part: gpu0, gpu1, gpu2, gpu3, gpu4, gpu5, gpu6, gpu7 ... (1,000 hosts)"


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    HostLog(tmp_path / "missing").began(["a"], restarts=0)
    assert HostLog(tmp_path / "missing").read() == {}


def test_a_job_of_many_hosts_is_read_to_the_beginning_of_its_attempt(tmp_path):
    """The line of 20,000 hosts alone is longer than what is read first, and losses follow it."""
    hosts = [f"node{number}.cluster.example" for number in range(20_000)]
    log = HostLog(tmp_path)
    log.began(hosts[:2], restarts=0)
    log.began(hosts, restarts=1)
    log.lost(hosts[7], "silent for 26 s")
    found = log.read()
    assert (len(found["hosts"]), found["restarts"]) == (19_999, 1)
    assert hosts[7] not in found["hosts"]


def test_a_job_of_any_number_of_attempts_keeps_the_newest_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(host_log, "MAX_BYTES", 10_000)
    log = HostLog(tmp_path)
    for number in range(1000):
        log.began([f"gpu{each}" for each in range(50)], restarts=number)
        log.lost("gpu7", f"loss {number}")
        assert (tmp_path / FILE).stat().st_size < 11_000
    found = log.read()
    assert (found["restarts"], len(found["hosts"])) == (999, 49)
    assert [loss["why"] for loss in found["lost"]] == ["loss 997", "loss 998", "loss 999"]
    assert len((tmp_path / FILE).read_text().splitlines()) > 10, "half of the file stays"


def test_a_loss_at_a_time_that_is_none_is_shown_as_unknown(tmp_path):
    log = HostLog(tmp_path)
    log.began(["a", "b"], restarts=0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1e300, "lost": "b", "why": "silent"}\n')
    assert words(log.read()) == ["takes part: a", "lost ?: b: silent"]
