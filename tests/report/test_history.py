"""Records of a run: which are read, which a resumed run replaces, and the curves that are made of them."""

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mtrain.records import history
from mtrain.records.history import History, Tail, learning_rate_of
from mtrain.records.smoothing import smooth_curve


def line(kind: str, update: int, **values: object) -> str:
    return json.dumps({"kind": kind, "update": update, **values}) + "\n"


def test_a_resumed_run_replaces_what_came_after_its_checkpoint() -> None:
    history = History()
    for update in range(6):
        history.add({"kind": "update", "update": update, "loss": update})
    for update in (0, 2, 4, 5):
        history.add({"kind": "evaluation", "update": update})
    history.add({"kind": "end", "update": 6})
    history.add({"kind": "start", "update": 4})
    assert (sorted(history.updates), sorted(history.evaluations), history.end) == ([0, 1, 2, 3], [0, 2, 4], None)
    history.add({"kind": "update", "update": 4, "loss": 9})
    assert history.updates[4]["loss"] == 9
    history.add({"kind": "start", "update": 0})
    assert (history.updates, history.evaluations) == ({}, {})


def test_a_line_that_is_half_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line("update", 0) + "no json\n[1]\n" + '{"kind": "upd')
    tail = Tail(file, from_start=True)
    assert [record["update"] for record in tail.read()] == [0]
    with file.open("a") as out:
        out.write('ate", "update": 1}\n' + line("update", 2))
    assert [record["update"] for record in tail.read()] == [1, 2]
    assert tail.read() == []
    assert tail.offset == file.stat().st_size
    later = Tail(file)
    with file.open("a") as out:
        out.write(line("update", 3))
    assert [record["update"] for record in later.read()] == [3]


def test_the_rate_of_an_update_is_that_of_its_last_group() -> None:
    assert learning_rate_of({"learning_rates": [0.1, 0.2, 0.01]}) == 0.01
    assert learning_rate_of({"learning_rate": 0.3}) == 0.3
    assert (learning_rate_of({"learning_rates": []}), learning_rate_of({})) == (None, None)


def test_smoothing_is_a_centred_mean_that_is_shorter_near_the_ends() -> None:
    values = np.random.default_rng(0).normal(size=100)
    result = smooth_curve(values, share=0.05)
    expected = [values[max(0, i - 2) : i + 3].mean() for i in range(100)]
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    np.testing.assert_array_equal(smooth_curve(values[:20]), values[:20])


@pytest.mark.parametrize("share", [0.04, 0.2])
def test_smoothing_keeps_a_line(share: float) -> None:
    values = np.full(200, 3.5)
    np.testing.assert_allclose(smooth_curve(values, share=share), values)


def test_of_a_long_run_every_so_many_updates_are_kept_and_the_last_one(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    evaluation = json.dumps({"kind": "evaluation", "update": 500, "metrics": {"map": 0.5}}) + "\n"
    lines = [line("update", number, losses={"total": 1 / (number + 1)}) for number in range(10_000)]
    path.write_text("".join([*lines[:500], evaluation, *lines[500:], lines[0][:30]]))
    real = history.parse_json
    monkeypatch.setattr(history, "parse_json", lambda line: parsed.append(line) or real(line))
    kept = history.read_history(path, most_updates=100)
    assert 50 <= len(kept.updates) <= 101
    assert list(kept.updates)[-1] == 9_999
    gaps = {later - earlier for earlier, later in itertools.pairwise(list(kept.updates)[:-1])}
    assert gaps == {128}
    assert kept.updates[128]["losses"] == {"total": 1 / 129}
    assert list(kept.evaluations) == [500]
    assert len(parsed) < 1_000, "the others were not read"
    assert len(history.read_history(path).updates) == 10_000


def test_updates_that_a_resumed_run_repeats_are_forgotten_in_a_long_run_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    start = json.dumps({"kind": "start", "update": 300}) + "\n"
    path.write_text(
        "".join([*map(partial(line, "update"), range(1000)), start, *map(partial(line, "update"), range(300, 420))])
    )
    kept = history.read_history(path, most_updates=10)
    assert max(kept.updates) == 419
    path.write_text("".join([*map(partial(line, "update"), range(1000)), start]))
    assert max(history.read_history(path, most_updates=10).updates) < 300


@pytest.mark.parametrize(
    "values", [{"losses": [1]}, {"metrics": 3}, {"epoch": "x"}, {"total_updates": 1.5}, {"losses": None}]
)
def test_a_record_whose_fields_are_of_other_types_is_passed_over(tmp_path: Path, values: dict) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line("update", 1, **values) + line("update", 2))
    read = [record["update"] for record in Tail(file, from_start=True).read()]
    assert read == ([1, 2] if values == {"losses": None} else [2])
