"""`scripts/gpu-bench` on a machine without a GPU: it refuses, or with --tiny does everything on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_bench
from mtrain_kit import kit

ROOT = Path(__file__).parents[1]
ORIGINAL = "import sys, time; time.sleep(0.4 * int(sys.argv[1])); print('trained')"


def bench(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-bench"), *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)


@pytest.mark.parametrize(("present", "counts"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_gpus_are_taken_in_powers_of_two(present: int, counts: list[int]) -> None:
    assert gpu_bench.numbers_of_gpus(present) == counts


@pytest.mark.parametrize(
    ("words", "lack"),
    [
        ([], None),
        (["--yolov5", "."], "--data: not given"),
        (["--data", "coco", "--yolov5", "."], "--images: not given"),
        (["--data", "coco", "--yolov5", ".", "--images", "5000"], "--yolov5-data: not given"),
        (["--data", "coco", "--paddledetection", ".", "--images", "5000"], None),
        (["--only", "kit"], None),
        (["--tiny", "--yolov5", "."], None),
    ],
)
def test_what_the_last_part_lacks_is_said_before_hours_of_measurements(words: list[str], lack: str | None) -> None:
    said = gpu_bench.missing(gpu_bench.parsed(words))
    assert said is None if lack is None else said is not None and said.startswith(lack)


def test_the_kit_takes_numbers_of_ranks_among_which_its_batch_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight GPUs it runs on six of them too: the largest number that it can take."""
    asked: list[str] = []
    monkeypatch.setattr(
        gpu_bench, "ran", lambda command, **_: asked.append(command[command.index("--ranks") + 1]) or {"exit": 0}
    )
    arguments = gpu_bench.parsed(["--backends", "ddp"])
    arguments.backends = ["ddp"]
    results = gpu_bench.Results(path=Path(os.devnull), machine={})
    gpu_bench.check_backends(gpu_bench.Plan(arguments=arguments, work=Path("/nowhere"), gpus=[1, 2, 4, 8]), results)
    assert asked == ["1", "2", "4", "6"]
    assert set(map(int, asked)) == set(gpu_bench.KIT_GPUS) <= set(kit.SIZES)


def test_an_epoch_is_the_difference_of_two_runs() -> None:
    assert gpu_bench.by_difference([10.0, 14.0], 800) == {"epoch_s": 4.0, "by_difference": 200.0}
    assert gpu_bench.by_difference([10.0, 14.0], None) == {"epoch_s": 4.0, "by_difference": None}
    assert gpu_bench.by_difference([10.0, 9.0], 800)["by_difference"] is None
    assert gpu_bench.by_difference([10.0], 800)["epoch_s"] is None


@pytest.mark.job
def test_originals_run_in_their_checkouts_and_failures_are_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ORIGINAL)
    words = ["--tiny", "--only", "speed", "--backends", "none", "--images", "100", "--yolov5", tmp_path]
    words += [
        "--paddledetection",
        tmp_path,
        "--paddledetection-command",
        "{python} missing.py",
        "--out",
        tmp_path / "a.json",
    ]
    ended = bench(*words, "--yolov5-command", "{python} train.py {epochs}")
    assert ended.returncode == 1, ended.stderr
    rows = {row["who"]: row for row in json.loads((tmp_path / "a.json").read_text())["speed"]}
    assert rows["yolov5"]["by_difference"] == pytest.approx(100 / rows["yolov5"]["epoch_s"], rel=0.01)
    assert rows["paddledetection"]["exit"] == 2
    assert "missing.py" in rows["paddledetection"]["output"]
    assert "1 commands failed" in ended.stdout


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nvidia-smi shows no GPU"),
        (["--gpus", "one"], "expected numbers of GPUs such as 1,2,4"),
        (["--yolov5", "/nowhere"], "/nowhere is no folder"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(words: list[str], message: str) -> None:
    ended = bench(*words)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path) -> None:
    ended = bench("--tiny", "--backends", "ddp", "--batch-per-gpu", "8", "--out", tmp_path / "all.json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    tested, prompt, late = found["correct"]
    assert tested["kit"] is not None
    assert prompt["weights_sha256"] == late["weights_sha256"]
    assert {row["spec"] for row in found["speed"]} == {"yolov5l", "ppyoloe_l"}
    assert all(row["by_records"] > 0 for row in found["speed"])
    assert found["machine"]["versions"]["mtrain"]
    lines = ended.stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("part"))
    rows = [line.split()[0] for line in lines[head + 1 : head + 6]]
    assert rows == ["kit", "precision", "precision", "speed", "speed"]
    assert "images/s" in lines[head + 4]
