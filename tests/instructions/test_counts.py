"""The comparison of instruction counts; the counts themselves take minutes: ``make instructions``."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.instructions.__main__ import CONTROL, FILE, FIXED, PROGRAMS, TOLERANCE, compared, count, read

KNOWN = {"versions": {"python": "3.11", "torch": "2"}, "counts": {"plan": 1_000_000}}
HEAD = "# callgrind format\nversion: 1\npid: 7\n"


def test_a_part_that_needs_more_than_it_may_is_named_and_one_that_needs_less_is_not():
    lines, worse = compared({"plan": 1_040_000}, KNOWN, KNOWN["versions"])
    assert (worse, lines) == (True, [f"{'plan':<10}{'1,040,000':>16}  +4.00%  TOO MANY"])
    lines, worse = compared({"plan": 900_000}, KNOWN, KNOWN["versions"])
    assert (worse, lines) == (False, [f"{'plan':<10}{'900,000':>16}  -10.00%"])
    assert compared({"plan": int(1_000_000 * (1 + 0.9 * TOLERANCE))}, KNOWN, KNOWN["versions"])[1] is False


def test_counts_of_other_versions_are_not_compared():
    lines, worse = compared({"plan": 9_000_000}, KNOWN, {"python": "3.12", "torch": "2"})
    assert not worse
    assert "not compared" in lines[0]
    assert lines[1].startswith("counts.json is of another machine or other versions: python 3.11 -> 3.12; ")


def test_counts_of_a_machine_that_counts_otherwise_are_not_compared():
    known = {**KNOWN, "counts": {**KNOWN["counts"], CONTROL: 1000}}
    assert compared({CONTROL: 1019, "plan": 9_000_000}, known, KNOWN["versions"])[1] is True
    lines, worse = compared({CONTROL: 979, "plan": 9_000_000}, known, KNOWN["versions"])
    assert not worse
    assert "plain_loop, in which nothing is mtrain's, by -2.10%" in lines[-1]


def test_the_parts_of_a_program_are_read_from_callgrinds_files(tmp_path):
    for number, (name, total) in enumerate({"startup": 12, "update": 34}.items(), 1):
        text = f"{HEAD}desc: Trigger: Client Request: {name}\nevents: Ir\nsummary: {total}\n\ntotals: {total}\n"
        (tmp_path / f"out.{number}").write_text(text)
    (tmp_path / "out").write_text(f"{HEAD}desc: Trigger: Program termination\nevents: Ir\ntotals: 5\n")
    assert read(sorted(tmp_path.glob("out*"))) == {"startup": 12, "update": 34}


def test_every_part_has_a_recorded_count():
    known = json.loads(FILE.read_text())
    assert set(known["counts"]) == {part for parts in PROGRAMS.values() for part in parts}


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("cc") and Path("/usr/include/valgrind/callgrind.h").exists()),
    reason="valgrind is not installed",
)
def test_a_count_is_the_same_twice():
    first, second = (count("loader")["loader"] for _ in range(2))
    assert abs(first - second) < 1e-4 * first


@pytest.mark.job
def test_a_counted_program_that_fails_is_told_with_its_words():
    argv = [sys.executable, "-m", "tests.instructions", "nothing"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, env=FIXED, cwd=FILE.parents[2])
    assert ended.returncode == 2
    assert "invalid choice: 'nothing'" in ended.stderr
