"""Images of many sizes in folders, through the real command line: the shipped ResNet-18 learns them on two ranks; a
pipeline of albumentations gives the same samples on any number of ranks, and the same bits after a resume."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.data.images.drawing import save_image
from tests import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
SMALL = ["data.root=digits", "data.image_size=32", "data.augment.flip_lr=0", "report.tensorboard=false"]
CLASSES = (0, 1, 2)


def mtrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, cwd=cwd, env=ENVIRONMENT, timeout=500)


def overrides(values: list[str]) -> list[str]:
    return [word for value in values for word in ("-o", value)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``digits``: scikit-learn's handwritten 0, 1 and 2 as PNG files of 20 to 48 pixels a side."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("folders")
    digits, rng = load_digits(), np.random.default_rng(0)
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        width, height = (int(side) for side in rng.integers(20, 49, 2))
        if label in CLASSES:
            grey = np.rint(image * 255 / 16).astype(np.uint8)
            large = cv2.resize(grey, (width, height), interpolation=cv2.INTER_LINEAR)
            split = "val" if index % 5 == 0 else "train"
            save_image(np.repeat(large[..., None], 3, axis=2), folder / f"digits/{split}/{label}/{index:04d}.png")
    return folder


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def losses_of(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["losses"]["total"] for record in records if record["kind"] == "update"]


@pytest.mark.slow
def test_the_shipped_resnet_learns_a_folder_on_two_ranks_is_scored_and_predicts(here: Path) -> None:
    values = [*SMALL, "data.augment.random_crop.scale=[0.6,1.0]", "train.epochs=2", "train.batch_size=32"]
    values += ["optimizer.learning_rate=0.02", "schedule.warmup.epochs=0", "data.workers=1", "evaluate.every_epochs=2"]
    words = ["-c", "resnet18_folder", "--backend", "ddp", "--nproc-per-node", "2", "--name", "r"]
    process = mtrain(*words, *overrides(values), cwd=here)
    assert process.returncode == 0, process.stdout + process.stderr
    best = summary_of(here / "runs/r")["best"]
    print(best)
    assert best["accuracy"] > 0.75
    process = mtrain("evaluate", "--run", "runs/r", cwd=here)
    assert process.returncode == 0, process.stdout + process.stderr
    assert summary_of(here / "runs/r-evaluate")["metrics"]["accuracy"] == best["accuracy"]
    process = mtrain("predict", "--run", "runs/r", "digits/val/0", "--out", "out", cwd=here)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads((here / "out/predictions.json").read_text())
    assert set(rows[0]) == {"file_name", "class", "label", "score"}
    files = list((here / "digits/val/0").glob("*.png"))
    found = sum(row["class"] == "0" for row in rows) / len(files)
    assert found == pytest.approx(best["accuracy/0"], abs=1e-9)


AUGMENTED = (
    "import albumentations as A\n"
    "def make():\n"
    "    return A.Compose([A.RandomResizedCrop(size=(32, 32), scale=(0.6, 1.0)), A.Rotate(limit=10),\n"
    "                      A.OneOf([A.ColorJitter(), A.GaussNoise()], p=0.9)])\n"
)
TINY = [*SMALL, "report.plots=false", "model.options.patch=8", "model.options.width=32", "data.format=image_folder", "data.resize=crop",
        "data.augment.albumentations=aug.py:make", "train.epochs=null", "train.updates=6", "train.batch_size=48",
        "evaluate.every_epochs=null", "checkpoint.every_epochs=null", "checkpoint.every_updates=3",
        "checkpoint.keep_last=9"]  # fmt: skip


@pytest.mark.slow
def test_albumentations_gives_the_same_samples_on_1_2_and_3_ranks_and_the_same_bits_after_a_resume(here: Path) -> None:
    (here / "aug.py").write_text(AUGMENTED)
    losses, digests = {}, {}

    def learn(name: str, ranks: int, workers: int, *more: str) -> None:
        words = ["-c", "vit_digits", "--backend", "ddp", "--nproc-per-node", str(ranks), "--name", name, *more]
        process = mtrain(*words, *overrides([*TINY, f"data.workers={workers}"]), cwd=here)
        assert process.returncode == 0, process.stdout + process.stderr
        losses[name], digests[name] = (
            losses_of(here / "runs" / name),
            summary_of(here / "runs" / name)["weights_sha256"],
        )

    for ranks in (1, 2, 3):
        learn(f"n{ranks}", ranks, ranks - 1)
    assert len(losses["n1"]) == 6
    for name in ("n2", "n3"):  # another sample would change a loss by more than rounding does
        np.testing.assert_allclose(losses[name], losses["n1"], rtol=2e-6)
    learn("other", 2, 3)
    assert digests["other"] == digests["n2"]
    run = here / "runs/n2"
    shutil.rmtree(run / "checkpoints/step-00000006")
    former = digests["n2"]
    (run / "summary.json").unlink()
    learn("n2", 2, 2, "--resume", str(run))
    assert digests["n2"] == former
