"""Tables, words and page of comparisons whose jobs are simulated."""

import json
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from mtrain.compare import tables, wording
from mtrain.compare.page import page
from mtrain.compare.profiles import PROFILES, violations
from mtrain.compare.results import Against, BackendRow, Comparison
from mtrain.compare.several import explain
from mtrain.compare.speed import left_out, speed_of
from mtrain.core.record_files import finite
from mtrain.core.state.trace import Shares
from mtrain.records.history import History
from mtrain.records.svg import Line, curves
from mtrain_trace.comparing import compare
from mtrain_trace.reading import Trace
from tests.comparing.jobs import RECIPE, Planted, run

SPEED = {"kind": "update", "losses": {}, "learning_rates": [0.1], "data_wait_share": 0.25}


def history(
    seconds: list[float], *, sent: int = 0, began: float = 100.0, shares: tuple[float, ...] = (), **more: float
) -> History:
    actual = History()
    for update, took in enumerate(seconds):
        record = {**SPEED, "update": update, "update_seconds": took, "time": began + sum(seconds[: update + 1]), **more}
        actual.add({**record, **({"sent_bytes": sent * update} if sent else {})})
    ranks = [{"memory_bytes": 3.0}, {"memory_bytes": 5.0}]
    if shares:
        ranks = [{**rank, "communication_share": share} for rank, share in zip(ranks, shares, strict=True)]
    actual.add({"kind": "end", "measured": ranks})
    return actual


def comparison(
    planted: dict[str, Planted], *, profile: str = "float32", rows: tuple[BackendRow, ...] = ()
) -> Comparison:
    jobs = {name: run(what) for name, what in planted.items()}
    speed = speed_of([history([0.1] * 12)], started=[99.0], batch=8, timed=True)
    results = [
        BackendRow(label=name, outcome="done", ranks=2, trace=trace, speed=speed, repeats=True)
        for name, trace in jobs.items()
    ]
    first = next(iter(jobs.values()))
    against = {}
    for name, trace in list(jobs.items())[1:]:
        actual = compare(first, trace)
        beyond = violations(actual.gaps, PROFILES[profile])
        against[name] = Against(difference=actual, beyond=beyond, causes=explain(actual))
    return Comparison(
        title="net on backends", source="a.yml", facts={"updates": "12 updates"}, profile=PROFILES[profile], updates=12,
        rows=[*results, *rows], against=against,
    )  # fmt: skip


ALIKE = {"one": Planted(), "two": Planted(), "three": Planted(noise=1e-7)}
WRONG = {**ALIKE, "<b>wrong</b>": Planted(recipe=replace(RECIPE, clip_norm=5.0))}
ABSENT = BackendRow(label="four", outcome="absent", reason="four needs a library")


def drifted(trace: Trace) -> Trace:
    """The trace of a job whose ranks hold different weights after update 5."""
    updates = [replace(each, ranks_agree={"weights": each.number < 5}) for each in trace.updates]
    return replace(trace, updates=updates)


@pytest.mark.parametrize("label", ["one", "two"])
def test_ranks_with_different_weights_are_no_agreement_even_if_rank_0_has_the_same_bits(label):
    alike = comparison(ALIKE)
    parted = [replace(row, trace=drifted(row.trace)) if row.label == label else row for row in alike.rows]
    result = replace(alike, rows=parted)
    assert not result.agree
    assert wording.headline(result) == f"The ranks of {label} do not hold the same weights"
    assert result.verdict(next(row for row in result.rows if row.label == label)) == "ranks differ"
    assert any(f"The ranks of {label} do not" in sentence.text for sentence in wording.summary(result))


def test_the_headline_says_that_backends_agree():
    result = comparison(ALIKE)
    assert result.agree
    assert wording.headline(result) == "All 3 backends agree within the profile float32"
    messages = [sentence.text for sentence in wording.summary(result)]
    assert messages[0].startswith("one and two are the same, bit for bit, in all 12 updates")
    assert messages[1].startswith("three agrees with one within float32: the loss is the same and the gradient norm")
    bitwise = comparison({"one": Planted(), "two": Planted()}, profile="bitwise")
    assert wording.headline(bitwise) == "All 2 backends train alike, bit for bit"


def test_a_backend_that_differs_is_named_with_the_cause_and_the_update():
    result = comparison(WRONG)
    assert not result.agree
    assert wording.headline(result) == "<b>wrong</b> does not train like one"
    (messages,) = [sentence.text for sentence in wording.summary(result) if sentence.good is False]
    assert "it clips at 5.0, the spec says 10" in messages
    assert (
        "The first difference is in update 3, in moments, weights and averaged weights; before it they are the same, bit for bit"
        in messages
    )


@pytest.mark.parametrize("row", [ABSENT, BackendRow(label="four", outcome="failed", reason="rank 1 fell over")])
def test_a_backend_that_did_not_run_makes_the_comparison_incomplete(row):
    result = comparison(ALIKE, rows=(row,))
    assert not result.agree
    assert wording.headline(result) == "The backends that ran agree; four did not run"
    assert any(row.reason in sentence.text and sentence.good is False for sentence in wording.summary(result))


def test_a_backend_whose_second_run_has_other_bits_is_reported():
    result = comparison(ALIKE)
    result = replace(result, rows=[replace(result.rows[0], repeats=False), *result.rows[1:]])
    assert not result.agree
    assert any("one is not reproducible" in sentence.text for sentence in wording.summary(result))


def test_tables_have_a_row_per_backend():
    columns, rows = tables.agreement(comparison(WRONG, rows=(ABSENT,)))
    assert [row[1] for row in rows] == ["reference", "same bits", "within float32", "differs", "not installed"]
    assert {len(row) for row in rows} == {len(columns)}
    columns, rows = tables.speeds(comparison(WRONG, rows=(ABSENT,)))
    assert [row[0] for row in rows] == list(WRONG)
    assert {len(row) for row in rows} == {len(columns)}


class Checker(HTMLParser):
    """Collects what a page refers to; complains of tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        return

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_page_is_complete_and_loads_no_other_file():
    text = page(comparison(WRONG, rows=(ABSENT,)))
    checker = Checker()
    checker.feed(text)
    assert checker.stack == []
    assert checker.links == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert "&lt;b&gt;wrong&lt;/b&gt;" in text
    assert "<b>wrong</b>" not in text
    assert "NaN" not in text


def test_the_page_can_be_made_when_no_job_has_run():
    result = Comparison(
        title="none", source="a.yml", facts={}, profile=PROFILES["bitwise"], updates=5, rows=[ABSENT], against={}
    )
    assert "four needs a library" in page(result)
    assert not result.agree


def test_the_results_can_be_written_as_json():
    values = json.loads(json.dumps(finite(comparison(WRONG, rows=(ABSENT,)).as_json()), allow_nan=False))
    assert values["agree"] is False
    assert values["same_bits"] == [["one", "two"], ["three"], ["<b>wrong</b>"]]
    wrong = values["backends"][3]["against_reference"]
    assert (wrong["first_update"], wrong["first_in"][0]) == (2, "moments")
    assert len(wrong["gaps"]["weights"]["curve"]) == 12


def test_curves_leave_out_values_that_are_not_finite():
    values = np.array([0.0, 1e-7, np.nan, 1e-5, np.inf, 1e-3])
    drawn = curves("x", [Line(label="a", colour=0, values=values)], updates=6, log=True)
    (path,) = re.findall(r'class="curve s0" d="([^"]*)"', drawn)
    assert path.count("M") == 3
    assert drawn.count("<circle") == 3
    assert "no difference in any update" in curves(
        "x", [Line(label="a", colour=0, values=np.zeros(4))], updates=4, log=True
    )


@pytest.mark.parametrize("values", [[5.0], [1.0, 1.0], [-3.0, 2e9], [1e-12, 2e-12]])
def test_every_range_of_values_gets_an_axis(values):
    drawn = curves("x", [Line(label="a", colour=0, values=np.array(values))], updates=len(values))
    assert drawn.count('class="grid"') >= 2


# --------------------------------------------------------------------------------------------------------------- speed
def test_speed_leaves_the_first_updates_out():
    speed = speed_of([history([9.0, 9.0, *[0.1] * 4, *[0.3] * 4], sent=1000)], started=[98.0], batch=8, timed=True)
    assert left_out(10) == 2
    assert speed.updates == 8
    assert speed.quartiles_ms == pytest.approx((100, 200, 300))
    assert speed.samples_per_s == pytest.approx(40)
    assert speed.startup_s == pytest.approx(100 + 9 - 98)
    assert speed.sent_bytes == 1000
    assert speed.memory_bytes == [3.0, 5.0]
    assert speed.communication_shares == []


@pytest.mark.parametrize(
    ("seconds", "updates", "load", "said"),
    [
        ((0.1, 0.2), 40, 0.0, "a is the fastest here with 100 ms an update; b takes 2.00 times as long"),
        ((0.2, 0.1), 40, 0.0, "b is the fastest here"),
        ((0.1, 0.2), 12, 0.0, "none is called the fastest: 10 timed updates are too few"),
        (
            (0.1, 0.2),
            40,
            1.0,
            "none is called the fastest: the machine had other work. Median update: a 100 ms and b 200 ms",
        ),
        ((0.1, 0.1), 40, 0.0, "none is called the fastest: the quartiles of a and b overlap"),
    ],
)
def test_a_fastest_backend_is_named_only_beyond_noise(seconds, updates, load, said):
    speeds = [speed_of([history([each] * updates)], started=[99.0], batch=8, timed=True) for each in seconds]
    rows = [
        BackendRow(label=label, outcome="done", ranks=1, speed=speed) for label, speed in zip("ab", speeds, strict=True)
    ]
    result = replace(comparison(ALIKE), rows=rows, against={}, load=load)
    assert said in wording.summary(result)[-1].text


def test_speed_of_several_jobs_is_over_all_of_them():
    jobs = [history([1.0, 0.1, 0.1], shares=(0.4, 0.1)), history([1.0, 0.3, 0.3], shares=(0.6, 0.1))]
    speed = speed_of(jobs, started=[99.0, 99.0], batch=8, timed=True)
    assert (speed.jobs, speed.updates) == (2, 4)
    assert speed.quartiles_ms[1] == pytest.approx(200)
    assert speed.communication_shares == pytest.approx([0.5, 0.1])


def test_the_share_of_communication_is_each_updates_own():
    shares, total = Shares(), 7.0  # what was waited at the start is no update's
    for waited in (3.0, 0.05, 0.02, 0.05, 9.0):
        total += waited
        shares.take({"communication_s": total, "update_seconds": 0.1})
    assert shares.summary() == {"communication_share": pytest.approx(0.5)}, "of 0.5, 0.2, 0.5 and no more than all"


def test_the_shares_of_a_run_of_any_length_are_a_few_numbers():
    shares, total = Shares(), 0.0
    for update in range(50_000):
        total += 0.02 if update % 2 else 0.06
        shares.take({"communication_s": total, "update_seconds": 0.1})
    assert len(pickle.dumps(shares)) < 50_000
    assert shares.summary()["communication_share"] in (pytest.approx(0.2), pytest.approx(0.6))


@pytest.mark.parametrize(
    ("shares", "cell"), [((), tables.UNKNOWN), ((0.0, 0.0), "0%"), ((0.124, 0.116), "12%"), ((0.4, 0.02), "2% to 40%")]
)
def test_ranks_that_wait_longer_than_others_are_reported_as_a_range(shares, cell):
    result = comparison({"one": Planted()})
    speed = speed_of([history([0.1] * 12, shares=shares)], started=[99.0], batch=8, timed=True)
    columns, rows = tables.speeds(replace(result, rows=[replace(result.rows[0], speed=speed)]))
    assert rows[0][columns.index("exchange wait")] == cell


def test_bytes_sent_by_a_traced_job_are_not_reported():
    assert speed_of([history([0.1] * 9, sent=1000)], started=[99.0], batch=8, timed=False).sent_bytes is None


def test_the_table_and_the_curves_have_the_same_sizes_and_count_updates_from_one():
    from mtrain.compare import page, tables

    result = comparison({"one": Planted(), "two": Planted(noise=1e-7)})
    gaps = result.against["two"].difference.gaps
    row = tables._differences(result.rows[1], result)
    assert row[0].startswith("update 1:")
    assert row[3] == f"{gaps['weights'].curve.max():.1e}"
    image = page._growth(result)[0]
    assert f"two, update {result.updates}:" in image
    assert "update 0:" not in image
