"""``make race`` against a stand-in for an original: what is started, and what is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.race import Race, compared, cpu_seconds, worded

RACE = Path(__file__).parents[1] / "benchmarks" / "race.py"
STAND_IN = """
import sys, time

epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
limit = time.process_time() + 0.2 + 8 * 0.05 * epochs  # 8 updates an epoch, 0.05 CPU seconds each
while time.process_time() < limit:
    pass
"""


def checkout(folder: Path, program: str, nms: str = "") -> Path:
    """Make a stand-in for YOLOv5, with the packages that it needs; ``nms`` runs when boxes are suppressed."""
    (folder / "train.py").write_text(program)
    (folder / "ultralytics.py").touch()
    (folder / "torchvision.py").write_text(
        f"class ops:\n    @staticmethod\n    def nms(*_):\n        {nms or 'pass'}\n"
    )
    return folder


def race(*words: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, str(RACE), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a checkout: --yolov5 FOLDER, --paddledetection FOLDER"),
        (("--yolov5", "missing"), "--yolov5 missing: expected a checkout that has train.py"),
        (("--yolov5", "CHECKOUT", "--batch", "7"), "--batch 7: expected a divisor of 64"),
        (("--yolov5", "CHECKOUT", "--python", "missing"), "--python missing: expected an interpreter"),
    ],
)
def test_what_cannot_be_raced_is_refused_in_one_sentence(tmp_path, words, message):
    (tmp_path / "train.py").touch()
    ended = race(*(str(tmp_path) if word == "CHECKOUT" else word for word in words))
    assert ended.returncode == 2
    assert message in ended.stderr


@pytest.mark.job
def test_all_that_an_interpreter_lacks_is_said_before_anything_trains(tmp_path):
    checkout(tmp_path, "raise SystemExit('trained')", nms="raise RuntimeError('no operator nms')")
    (tmp_path / "ultralytics.py").write_text("raise ImportError('there is none')")
    (tmp_path / "imgaug.py").write_text("import numpy; numpy.sctypes_of_numpy_1")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").touch()
    ended = race("--yolov5", str(tmp_path), "--paddledetection", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (2, "")
    nms, ultralytics, imgaug = ended.stderr.splitlines()
    assert nms.startswith("--yolov5 needs torchvision.ops.nms for the installed torch: ")
    assert f"{sys.executable} in {tmp_path}: RuntimeError: no operator nms; install the torchvision that " in nms
    assert "needs ultralytics" in ultralytics
    assert "ImportError: there is none; install the checkout's requirements.txt" in ultralytics
    assert imgaug.startswith("--paddledetection needs imgaug, which needs numpy 1: ")
    assert imgaug.endswith("; install imgaug and 'numpy<2', or name another interpreter by --python")


def test_a_row_has_medians_and_spread_and_says_who_is_ahead():
    row = {"name": "x", "original": [1.0, 3.0, 2.0], "ours": [2.0, 2.0, 2.5], "ratios": [0.5, 1.5, 0.8], "ratio": 0.8}
    assert worded(row) == (
        "x: original 2.000 (1.000 to 3.000) s CPU per update, mtrain 2.000 (2.000 to 2.500); ratio 0.800 (0.500 to 1.500), "
        "mtrain is NOT ahead"
    )


def test_a_row_says_what_the_variables_of_mtrain_alone_give_the_original():
    sides = {"original": [4.0, 6.0], "original with variables": [1.0, 3.0], "ours": [2.0, 2.0]}
    ratios = {"variables": {"MKL": "5"}, "with variables": compared(sides["original with variables"], sides["ours"])}
    words = worded({"name": "x", **sides, **compared(sides["original"], sides["ours"]), **ratios})
    assert words == (
        "x: original 5.000 (4.000 to 6.000) s CPU per update, mtrain 2.000 (2.000 to 2.000); ratio 2.500 (2.000 to 3.000), "
        "mtrain is ahead\n  with MKL=5: original 2.000 (1.000 to 3.000); ratio 1.000 (0.500 to 1.500), mtrain is NOT ahead"
    )


@pytest.mark.job
def test_the_variables_of_a_race_go_to_a_side_of_their_own(tmp_path):
    def command(epochs, folder):
        return [sys.executable, "-c", "pass"]

    race = Race(name="x", batch=8, original=command, ours=command, cwd=tmp_path, variables={"MKL": "5"})
    assert {name: side.variables for name, side in race.sides(tmp_path).items()} == {
        "original": {}, "original with variables": {"MKL": "5"}, "ours": {},
    }  # fmt: skip
    told = [sys.executable, "-c", "import os; raise SystemExit(os.environ.get('MKL'))"]
    with pytest.raises(SystemExit, match="5"):
        cpu_seconds(told, cwd=tmp_path, variables={"MKL": "5"})


@pytest.mark.slow
def test_only_the_updates_that_a_longer_job_has_more_are_counted(tmp_path):
    checkout(tmp_path, STAND_IN)
    target = tmp_path / "rows.json"
    ended = race(
        "--yolov5", str(tmp_path), "--rounds", "1", "--epochs", "1", "2", "--side", "64", "--json", str(target)
    )
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(target.read_text())
    assert row["original"] == [pytest.approx(0.05, rel=0.2)]
    assert row["ours"][0] > 0


@pytest.mark.slow
def test_an_original_that_fails_is_told_with_its_last_words(tmp_path):
    checkout(tmp_path, "raise SystemExit('this needs a GPU')")
    ended = race("--yolov5", str(tmp_path), "--rounds", "1", "--epochs", "1", "2")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("this needs a GPU")
