"""A rank that the others wait for is named while it trains: on the console, in the records, and for Prometheus."""

import json

import pytest

from tests.ports import held_port
from tests.script.runs import SCRIPTS, done

pytestmark = pytest.mark.job

SCRIPT = str(SCRIPTS / "slow_rank.py")


def records(folder, kind):
    lines = map(json.loads, (folder / "runs" / "slow" / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def live(folder, rank):
    return json.loads((folder / f"live-{rank}.json").read_text())


def assert_one_collective_an_update(folder, *, ranks, updates):
    """The ranks agree in one vector after each update, and in a second one after the first, whose metrics have new names."""
    for rank in range(ranks):
        made = json.loads((folder / f"collectives-{rank}.json").read_text())
        assert made == [["all_reduce"] * 2, *[["all_reduce"]] * (updates - 2)]


@pytest.mark.parametrize(
    "backend", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("horovod", "deepspeed"))]
)
def test_of_three_ranks_the_slow_one_is_named_and_of_even_ones_none(backend, tmp_path):
    words = ("--name", "slow", "--backend", backend, "--nproc-per-node", "3")
    metrics = ("-o", f"report.metrics_port={held_port()}")
    ended = done(tmp_path, *words, *metrics, SCRIPT, "--slow-rank", "2", "--updates", "30")
    (warning,) = (record for record in records(tmp_path, "warning") if "wait for" in record["message"])
    assert "the other ranks wait for rank 2:" in warning["message"]
    assert warning["message"] in ended.stdout + ended.stderr
    named = [record["update"] for record in records(tmp_path, "update") if record.get("stragglers") == [2]]
    assert named == list(range(named[0], 30))
    assert named[0] <= 23
    assert [live(tmp_path, rank)["straggler"] for rank in range(3)] == [0, 0, 1]
    if backend == "ddp":
        assert_one_collective_an_update(tmp_path, ranks=3, updates=30)
    counted = [
        record["sent_bytes_per_update"] for record in records(tmp_path, "update") if "sent_bytes_per_update" in record
    ]
    assert 0 < counted[0] < 100_000, (
        "five numbers of a model, and what ranks agree with; Horovod asks every few milliseconds"
    )


def test_even_ranks_are_not_named(tmp_path):
    done(tmp_path, "--name", "slow", "--backend", "ddp", "--nproc-per-node", "3", SCRIPT)
    assert [record for record in records(tmp_path, "warning") if "wait for" in record["message"]] == []
    assert [record for record in records(tmp_path, "update") if "stragglers" in record] == []


def test_the_search_can_be_switched_off(tmp_path):
    words = ("--name", "slow", "--backend", "ddp", "--nproc-per-node", "2", "-o", "report.stragglers=false")
    done(tmp_path, *words, SCRIPT, "--slow-rank", "1", "--updates", "25")
    assert records(tmp_path, "warning") == []
    assert all("communication_s" not in record for record in records(tmp_path, "update"))
