"""A classification job through the real command line: it trains, is scored, predicts, and the same on every stack."""

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.data.images.decode import decode
from mtrain.data.images.drawing import save_image
from mtrain.tasks.classification.digits import DigitsClasses
from tests import warm
from tests.starts import starts_processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
QUICK = ["data.workers=1", "train.batch_size=96", "optimizer.learning_rate=0.004", "report.tensorboard=false"]


def mtrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)


def overrides(*values: str) -> list[str]:
    return [word for value in values for word in ("-o", value)]


@pytest.fixture(scope="module")
@starts_processes
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/small``, six epochs on one rank, and ``digits/``, five images of the evaluation split."""
    folder = tmp_path_factory.mktemp("classified")
    process = mtrain(
        "-c", "vit_digits", "--backend", "solo", "--name", "small", "--epochs", "6", *overrides(*QUICK), cwd=folder
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (folder / "stdout.txt").write_text(process.stdout)
    val = DigitsClasses().read(SplitRequest(split="val"))
    for index in range(5):
        save_image(val.images[index], folder / "digits" / f"{index}.png")
    return folder


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def losses_of(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["losses"]["total"] for record in records if record["kind"] == "update"]


def test_a_few_epochs_already_tell_digits_apart(trained):
    summary = summary_of(trained / "runs/small")
    assert summary["best"]["score"] == summary["best"]["accuracy"] > 0.6
    assert summary["headline"] == ["accuracy", "balanced_accuracy"]
    assert len([name for name in summary["best"] if name.startswith("accuracy/")]) == 10
    assert decode(trained / "runs/small/val_batch.jpg").size > 0
    assert (trained / "runs/small/results.png").is_file()


def test_the_console_speaks_of_accuracy_classes_and_mistakes(trained):
    message = (trained / "stdout.txt").read_text()
    for text in ("evaluation: accuracy 0.", "best evaluation: accuracy 0.", "accuracy by class: 0 ", "mistakes: "):
        assert text in message
    assert " AP" not in message


def test_evaluate_repeats_the_metrics_of_the_best_checkpoint(trained):
    process = mtrain("evaluate", "--run", "runs/small", cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "accuracy by class: 0 " in process.stdout
    metrics, best = summary_of(trained / "runs/small-evaluate")["metrics"], summary_of(trained / "runs/small")["best"]
    assert {name: best[name] for name in metrics} == metrics


def test_a_plain_file_of_weights_is_scored_too_its_positions_included(trained):
    weights = sorted((trained / "runs/small/checkpoints").glob("*/ema.safetensors"))[-1]
    arguments = ["-c", "vit_digits", "--backend", "solo", "--weights", str(weights), "--name", "plain"]
    process = mtrain("evaluate", *arguments, *overrides(*QUICK), cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    last = summary_of(trained / "runs/small")["last"]
    assert summary_of(trained / "runs/plain")["metrics"]["accuracy"] == last["accuracy"]


def test_predict_names_the_digits_of_image_files(trained):
    process = mtrain("predict", "--run", "runs/small", "--confidence", "0", "--out", "out", "digits", cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "5 images: 5 predictions with a score >= 0" in process.stdout
    rows = json.loads((trained / "out/predictions.json").read_text())
    assert [row["file_name"] for row in rows] == [f"{digit}.png" for digit in range(5)]
    assert all(row["class"] == str(row["label"]) and 0.1 <= row["score"] <= 1 for row in rows)
    original = DigitsClasses().read(SplitRequest(split="val")).labels[:5]
    assert sum(row["label"] == label for row, label in zip(rows, original, strict=True)) >= 3
    assert len(list((trained / "out").glob("*.jpg"))) == 5


def test_plan_prints_the_job_as_for_any_other(trained):
    process = mtrain("plan", "-c", "vit_digits", cwd=trained)
    assert process.returncode == 0, process.stderr
    assert "64 = 2 ranks x 32 (micro batch) x 1 (accumulate)" in process.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["data.format=digits"], "digits is a data set for detection, but model.name: vit is for classification"),
        (["evaluate.score=AP"], "evaluate.score: 'AP' given, expected a metric of this job's evaluation; known: accuracy"),
        (["evaluate.score=acuracy"], "did you mean 'accuracy'?"),
        (["data.augment.mosaic=0.5"], "data.augment.mosaic=0.5: unknown key: it belongs to the task detection, and this job's"),
        (["data.image_size=9"], "use 8"),
        (["data.root=somewhere"], "digits_classes comes with scikit-learn"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_remedy(trained, values, message):
    process = mtrain("-c", "vit_digits", "-b", "solo", "--name", "refused", *overrides(*QUICK, *values), cwd=trained)
    assert process.returncode == 2, process.stdout + process.stderr
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (trained / "runs" / "refused").exists()


def test_a_detector_is_refused_for_a_classification_data_set(trained):
    values = ["data.format=digits_classes", "data.image_size=64"]
    process = mtrain("-c", "digits", "-b", "solo", "--name", "refused", *overrides(*values), cwd=trained)
    assert process.returncode == 2, process.stdout + process.stderr
    assert "digits_classes is a data set for classification, but model.name: yolov5n is for detection" in process.stderr


STACKS = {
    "solo-torch": ["-b", "solo"],
    "solo-paddle": ["-b", "solo", "-o", "backend.options.framework=paddle"],
    "ddp-2": ["-b", "ddp", "--nproc-per-node", "2"],
    "fleet-2": ["-b", "fleet", "--nproc-per-node", "2"],
}


@pytest.mark.slow
def test_every_stack_trains_alike(trained):
    """Twelve updates in float64 with augmentation, AdamW, decay groups, clipping and EMA."""
    values = [
        *QUICK,
        "report.plots=false",
        "train.epochs=null",
        "train.updates=12",
        "train.precision=fp64",
        "evaluate.every_epochs=null",
    ]
    values += ["schedule.warmup=null", "checkpoint.every_epochs=null"]
    losses, accuracies = {}, {}
    for name, stack in STACKS.items():
        process = mtrain("-c", "vit_digits", *stack, "--name", name, *overrides(*values), cwd=trained)
        assert process.returncode == 0, process.stdout + process.stderr
        losses[name] = losses_of(trained / "runs" / name)
        accuracies[name] = summary_of(trained / "runs" / name)["last"]["accuracy"]
    assert len(losses["solo-torch"]) == 12
    assert losses["solo-torch"][-1] < losses["solo-torch"][0]
    for name in STACKS:
        np.testing.assert_allclose(losses[name], losses["solo-torch"], rtol=1e-9, err_msg=name)
    assert len(set(accuracies.values())) == 1


EXACT = ["train.epochs=null", "train.updates=12", "evaluate.every_epochs=null", "checkpoint.every_epochs=null"]
"""Twelve updates of the fourteen of an epoch, scored at the end."""
ZERO = {stage: ["-b", "deepspeed", "-o", f"backend.options.stage={stage}"] for stage in (1, 2, 3)}
ALIKE = {"ddp": ["-b", "ddp"], "horovod": ["-b", "horovod"], **{f"deepspeed-{n}": words for n, words in ZERO.items()}}


def learnt(folder: Path, name: str, *more: str) -> dict:
    """Run a job of two ranks; return its final digests and every metric of its evaluation."""
    stack = [*ALIKE[name], "--nproc-per-node", "2", "--name", f"exact-{name}"]
    values = [*QUICK, *EXACT, "report.plots=false", "checkpoint.every_updates=5", "checkpoint.keep_last=9"]
    process = mtrain("-c", "vit_digits", *stack, *overrides(*values), *more, cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    summary = summary_of(folder / f"runs/exact-{name}")
    return {key: summary[key] for key in ("updates", "last", "weights_sha256", "ema_sha256")}


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The results of two ranks of ddp."""
    return learnt(tmp_path_factory.mktemp("by-ddp"), "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALIKE if name != "ddp"])
def test_two_ranks_have_the_weights_and_metrics_of_ddp_bit_for_bit(tmp_path: Path, by_ddp: dict, name: str) -> None:
    if find_spec(name.partition("-")[0]) is None:
        pytest.skip(f"{name} is not installed here")
    ours = learnt(tmp_path, name)
    print(f"{name}: accuracy {ours['last']['accuracy']}, weights {ours['weights_sha256'][:16]}")
    assert ours == by_ddp


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "deepspeed-3"])
def test_resumed_in_mid_epoch_it_ends_with_the_same_bits(tmp_path: Path, by_ddp: dict, name: str) -> None:
    if name != "ddp" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed here")
    assert learnt(tmp_path, name) == by_ddp
    run = tmp_path / f"runs/exact-{name}"
    for later in ("step-00000010", "step-00000012"):
        shutil.rmtree(run / "checkpoints" / later)
    shutil.move(run / "summary.json", tmp_path / "former.json")
    assert learnt(tmp_path, name, "--resume", str(run)) == by_ddp
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    starts = [record["update"] for record in records if record["kind"] == "start"]
    assert starts == [0, 5]


def test_evaluation_can_join_what_is_predicted_for_mirrored_copies(trained):
    plain = summary_of(trained / "runs/small")["best"]
    process = mtrain("evaluate", "--run", "runs/small", "-o", "evaluate.augment=true", cwd=trained)
    assert process.returncode == 0, process.stdout + process.stderr
    run = max((trained / "runs").glob("small-evaluate*"), key=lambda folder: folder.stat().st_mtime)
    joined = summary_of(run)["metrics"]
    assert 0 < joined["accuracy"] != plain["accuracy"]  # digits are not symmetric, so their mirror images mislead
