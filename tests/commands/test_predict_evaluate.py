"""``evaluate`` and ``predict`` on a run that was really trained, through the real command line."""

import json
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests import warm
from tests.starts import starts_processes

HERE = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def mtrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)


@pytest.fixture(scope="module")
@starts_processes
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/small``: digits at 64 px, two epochs on one rank."""
    folder = tmp_path_factory.mktemp("trained")
    made = mtrain("data", "make", "digits", "digits", "--train", "16", "--val", "8", "--size", "64", cwd=folder)
    assert made.returncode == 0, made.stderr
    values = ["data.format=coco", "data.root=digits", "data.image_size=64", "train.batch_size=8", "data.workers=1"]
    # --eval, as PaddleDetection's users type it, evaluates although the spec does not.
    (folder / "mine.yml").write_text("_BASE_: digits\nevaluate: {every_epochs: null}\n")
    flags = ("--backend", "solo", "--name", "small", "--epochs", "2", "--eval")
    process = mtrain("-c", "mine.yml", *flags, "-o", *values, cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    (folder / "stdout.txt").write_text(process.stdout)
    return folder


def test_the_console_the_records_and_the_summary_name_the_device(trained):
    run, message = trained / "runs/small", (trained / "stdout.txt").read_text().splitlines()
    assert "solo, 1 rank, cpu, fp32" in next(line for line in message if line.startswith("start: "))
    assert " on 1 rank, cpu" in next(line for line in message if line.startswith("done: "))
    start = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["kind"], start["device"]) == ("start", "cpu")
    assert json.loads((run / "summary.json").read_text())["device"] == "cpu"
    assert "devices" in (run / "plan.txt").read_text()


@pytest.mark.smoke
def test_a_run_folder_holds_everything_that_was_promised(trained):
    run = trained / "runs" / "small"
    names = (
        "spec.yml spec.json plan.txt plan.json environment.json metrics.jsonl results.png val_batch.jpg summary.json "
        "logs/rank-0.log checkpoints tensorboard details.json inputs.jpg report.html"
    )
    assert [name for name in names.split() if not (run / name).exists()] == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 4
    assert {"AP", "AP50", "score"} <= set(summary["last"])
    assert list((run / "tensorboard").iterdir())
    report = (run / "report.html").read_text()
    assert report.count("data:image/jpeg;base64,") == 2
    assert "best AP50" in report
    assert f"report:      open {Path('runs/small/report.html')}" in (trained / "stdout.txt").read_text()
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (kinds.count("update"), kinds.count("evaluation")) == (4, 2), "--eval trains, and evaluates after each epoch"


def test_evaluate_repeats_the_metrics_of_the_best_checkpoint_in_the_folder_that_was_named(trained):
    process = mtrain("evaluate", "--run", "runs/small", "--name", "scored", cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    best = json.loads((trained / "runs/small/summary.json").read_text())["best"]
    metrics = json.loads((trained / "runs/scored/summary.json").read_text())["metrics"]
    assert {name: metrics[name] for name in ("AP", "AP50", "AR100")} == {
        name: best[name] for name in ("AP", "AP50", "AR100")
    }


@pytest.mark.smoke
def test_predict_writes_coco_json_and_images(trained):
    process = mtrain(
        "predict", "--run", "runs/small", "--confidence", "0.0", "--out", "out", "digits/images", cwd=trained
    )
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads((trained / "out/predictions.json").read_text())
    assert rows
    assert {"image_id", "category_id", "bbox", "score", "file_name", "class"} <= set(rows[0])
    assert {row["file_name"] for row in rows} <= {file.name for file in (trained / "digits/images").iterdir()}
    assert all(row["class"] == str(row["category_id"] - 1) for row in rows), "the digit's own name"
    left, top, width, height = rows[0]["bbox"]
    assert min(left, top, width, height) >= 0
    assert max(left + width, top + height) <= 64 + 1e-3
    assert len(list((trained / "out").glob("*.jpg"))) == 24


def test_predict_takes_the_averaged_weights_as_a_plain_file(trained):
    weights = next((trained / "runs/small/checkpoints").glob("*/ema.safetensors"))
    names = f"data.names=[{','.join(repr(str(digit)) for digit in range(10))}]"
    for number, spec in enumerate((["-c", "runs/small/spec.yml"], ["--run", "runs/small"])):
        arguments = [*spec, "--weights", str(weights), "-o", names]
        process = mtrain(
            "predict", *arguments, "--confidence", "0.0", "--out", f"plain{number}", "digits/images", cwd=trained
        )
        assert process.returncode == 0, process.stdout + process.stderr
    first, second = ((trained / f"plain{number}/predictions.json").read_bytes() for number in (0, 1))
    assert json.loads(first)
    assert first == second


@pytest.mark.skipif(find_spec("paddle") is None, reason="paddle is not installed")
def test_predict_runs_on_the_framework_of_the_spec_and_needs_no_other(trained, monkeypatch):
    (trained / "trap/torch").mkdir(parents=True)
    (trained / "trap/torch/__init__.py").write_text("raise ImportError('torch is not to be imported')")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(trained / "trap"))
    arguments = ["--run", "runs/small", "--confidence", "0.0", "--no-draw", "digits/images", "digits/images", "--out"]
    before = set(Path(tempfile.gettempdir()).glob("mtrain-predict-*"))
    failed = mtrain("predict", *arguments, "failed", cwd=trained)
    assert failed.returncode != 0
    assert "failed/.run/logs/rank-0.log" in failed.stderr, "the log that is named is in the folder of the results"
    assert set(Path(tempfile.gettempdir()).glob("mtrain-predict-*")) == before
    paddle = ["-o", "backend.options={framework: paddle}"]
    process = mtrain("predict", *arguments, "by-paddle", *paddle, cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads((trained / "by-paddle/predictions.json").read_text())
    assert {row["file_name"].rpartition("/")[0] for row in rows} == {"digits/images"}, "of several sources: as given"
    assert mtrain("predict", *arguments, "failed", *paddle, cwd=trained).returncode == 0
    assert not (trained / "failed/.run").exists(), "a prediction that succeeds leaves nothing but its results"


def test_a_class_id_of_predict_is_the_annotation_files_own(trained):
    shutil.copytree(trained / "digits", trained / "renumbered", dirs_exist_ok=True)
    for split in ("train", "val"):
        file = trained / "renumbered" / "annotations" / f"instances_{split}.json"
        content = json.loads(file.read_text())
        for entry in content["categories"]:
            entry["id"] += 40
        for entry in content["annotations"]:
            entry["category_id"] += 40
        file.write_text(json.dumps(content))
    values = ["data.format=coco", "data.root=renumbered", "data.image_size=64", "train.batch_size=8", "data.workers=0"]
    quiet = ("report.plots=false", "report.tensorboard=false")
    train = ("train", "-c", "digits", "-b", "solo", "--name", "ids", "--epochs", "1", "-o", *values, *quiet)
    assert mtrain(*train, cwd=trained).returncode == 0
    assert (
        mtrain(
            "predict", "--run", "runs/ids", "--confidence", "0", "--no-draw", "digits/images", cwd=trained
        ).returncode
        == 0
    )
    rows = json.loads((trained / "predictions/predictions.json").read_text())
    assert {row["category_id"] for row in rows} <= set(range(40, 51))


def damaged(trained: Path, folder: str) -> list[str]:
    """Make ``folder`` with two images that can be read and three that cannot; the names of the latter.

    One is cut short, one is text, and one is damaged where only decoding notices it.
    """
    (trained / folder).mkdir()
    good = sorted((trained / "digits/images").iterdir())[:2]
    for file in good:
        shutil.copy(file, trained / folder)
    content = good[0].read_bytes()
    (trained / folder / "cut.jpg").write_bytes(content[: len(content) // 2])
    (trained / folder / "text.jpg").write_text("no image")
    image = np.zeros((16, 16, 3), np.uint8)
    png = bytearray(cv2.imencode(".png", image)[1].tobytes())
    png[png.index(b"IDAT") + 6] ^= 0xFF
    (trained / folder / "wrong.png").write_bytes(png)
    return ["cut.jpg", "text.jpg", "wrong.png"]


def test_predict_skips_images_that_cannot_be_read_and_names_them(trained):
    bad = damaged(trained, "mixed")
    arguments = ["predict", "--run", "runs/small", "--confidence", "0", "--out", "mixed-out"]
    process = mtrain(*arguments, "mixed", cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "warning: skipped 3 images that cannot be read" in process.stderr
    assert [line.split(": ")[0].strip() for line in process.stderr.splitlines() if line.startswith("  ")] == bad
    assert "2 images (3 of 5 skipped): " in process.stdout
    skipped = json.loads((trained / "mixed-out/skipped.json").read_text())
    assert [row["file_name"] for row in skipped] == bad
    assert all(row["reason"] for row in skipped)
    rows = json.loads((trained / "mixed-out/predictions.json").read_text())
    assert len({row["file_name"] for row in rows} - set(bad)) == 2
    assert len(list((trained / "mixed-out").glob("*.jpg"))) == 2
    assert mtrain(*arguments, "digits/images", cwd=trained).returncode == 0
    assert not (trained / "mixed-out/skipped.json").exists(), "it told of an earlier prediction"


def test_predict_stops_where_nothing_can_be_read_and_with_strict_at_the_first_image(trained):
    bad = damaged(trained, "bad")
    arguments = ["predict", "--run", "runs/small", "--no-draw", "--out", "bad-out"]
    strict = mtrain(*arguments, "--strict", "bad", cwd=trained)
    nothing = mtrain(*arguments, *(f"bad/{name}" for name in bad), cwd=trained)
    for done, told in ((strict, "2 of 5 images cannot be read"), (nothing, "none of 3 images can be read")):
        assert done.returncode == 2, done.stdout + done.stderr
        assert told in done.stderr
        assert "bad/text.jpg" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (trained / "bad-out/predictions.json").exists()


@pytest.mark.job
def test_evaluation_without_a_run_says_what_to_evaluate(tmp_path):
    process = mtrain("evaluate", "-c", "digits", cwd=tmp_path)
    assert process.returncode == 2
    assert "nothing to evaluate: no run digits" in process.stderr
    assert "`mtrain evaluate FOLDER`" in process.stderr
    assert "--resume" not in process.stderr


def test_sources_without_images_are_all_named_and_nothing_starts(trained):
    process = mtrain("predict", "--run", "runs/small", "nowhere", "runs/small/checkpoints", cwd=trained)
    assert process.returncode == 2
    assert "nowhere" in process.stderr
    assert "runs/small/checkpoints" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["train.batch_size=7", "cluster.nproc_per_node=2", "backend.name=ddp"], "use 6 or 8"),
        (["train.batch_size=64"], "use at most 16"),
        (["data.image_size=70"], "use 64"),
        (["data.names=[a,b]"], "data.names"),
        (["model.weights=absent.safetensors"], "absent.safetensors does not exist"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_remedy(trained, values, message):
    arguments = [
        "data.format=coco",
        "data.root=digits",
        "data.image_size=64",
        "train.batch_size=8",
        "backend.name=solo",
    ]
    process = mtrain("train", "-c", "digits", "--name", "refused", "-o", *arguments, *values, cwd=trained)
    assert process.returncode == 2, process.stdout + process.stderr
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (trained / "runs" / "refused").exists()


def test_missing_and_unreadable_images_are_all_named_before_anything_starts(trained):
    shutil.copytree(trained / "digits", trained / "broken", dirs_exist_ok=True)
    first, second = sorted((trained / "broken" / "images").iterdir())[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    values = ["data.format=coco", "data.root=broken", "data.image_size=64", "train.batch_size=8"]
    process = mtrain("train", "-c", "digits", "--backend", "solo", "--name", "never", "-o", *values, cwd=trained)
    assert process.returncode == 2
    assert first.name in process.stderr
    assert second.name in process.stderr
    assert not (trained / "runs" / "never").exists()
