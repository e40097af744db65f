"""A segmentation job through the real command line: it trains, is scored, predicts, resumes, and the same on every stack."""

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.images.decode import decode
from mtrain.data.images.drawing import save_image
from mtrain.data.images.indexed import read_indices, write_indices
from tests import warm
from tests.starts import starts_processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
QUICK = (
    "data.root=digits", "data.options={train: 16, val: 5, classes: ink}", "data.workers=0", "train.batch_size=4",
    "model.options={width: 4, depth: 2, dropout: 0.1}", "evaluate.every_epochs=1", "evaluate.batch_size=2", "checkpoint.every_epochs=1",
    "report.tensorboard=false", "report.every_updates=1", "cluster.threads=1",
)  # fmt: skip


def mtrain(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    process = warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)
    assert process.returncode == status, process.stdout + process.stderr
    return process


def train(cwd: Path, name: str, *values: str, backend: str = "solo", ranks: int = 1, epochs: int = 1) -> Path:
    quick = [value for value in QUICK if not (value.startswith("model.") and "model.name=liteseg" in values)]
    # What is drawn and written for people is looked at in the first job alone.
    drawn = f"report.plots={str(name == 'small').lower()}"
    overrides = [word for value in (*quick, drawn, *values) for word in ("-o", value)]
    arguments = ["-c", "unet_digits", "-b", backend, "--nproc-per-node", str(ranks), "--name", name]
    mtrain("train", *arguments, "--epochs", str(epochs), *overrides, cwd=cwd)
    return cwd / "runs" / name


def records(run: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [record["losses"]["total"] for record in records(run, "update")]


def metrics(run: Path) -> list[dict]:
    return [record["metrics"] for record in records(run, "evaluation")]


@pytest.fixture(scope="module")
@starts_processes
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/small``, one epoch on one rank, and its data in ``digits``."""
    folder = tmp_path_factory.mktemp("segmented")
    train(folder, "small")
    return folder


def test_a_job_is_scored_by_mean_iou_and_draws_what_it_sees(trained):
    summary = json.loads((trained / "runs/small/summary.json").read_text())
    assert summary["headline"] == ["miou", "pixel_accuracy"]
    assert 0 < summary["best"]["score"] == summary["best"]["miou"] < 1
    assert {"iou/background", "pixel_accuracy"} <= set(summary["best"])
    assert decode(trained / "runs/small/val_batch.jpg").size > 0


def test_evaluate_repeats_the_metrics_of_the_job(trained):
    process = mtrain("evaluate", "--run", "runs/small", cwd=trained)
    assert "iou by class: background 0." in process.stdout
    again = json.loads((trained / "runs/small-evaluate/summary.json").read_text())["metrics"]
    best = json.loads((trained / "runs/small/summary.json").read_text())["best"]
    assert {name: best[name] for name in again} == again


def test_predict_writes_masks_and_a_summary_of_the_classes(trained):
    images = sorted((trained / "digits/JPEGImages").glob("val_*.png"))[:2]
    arguments = ["--run", "runs/small", "--confidence", "0", "--out", "out"]
    mtrain("predict", *arguments, *map(str, images), cwd=trained)
    rows = json.loads((trained / "out/predictions.json").read_text())
    for image in images:
        indices = read_indices(trained / "out" / image.name)
        assert indices.shape == (64, 64)
        of_image = {row["label"]: row["share"] for row in rows if row["mask"] == image.name}
        labels, counts = np.unique(indices, return_counts=True)
        assert of_image == {int(label): count / 64**2 for label, count in zip(labels, counts, strict=True)}
        assert (trained / "out" / f"{image.stem}.jpg").is_file()
    assert {row["class"] for row in rows} <= {"background", "ink"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["data.image_size=65"], "data.image_size: 65 is not a multiple of 4 as this model needs; use 64"),
        (["data.options={classes: inc}"], "'digits' or 'ink'"),
        (["evaluate.augment=true"], "evaluate.augment: true, but unet cannot join what it predicts for varied copies"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(trained, values, message):
    overrides = [word for value in (*QUICK, *values) for word in ("-o", value)]
    process = mtrain("train", "-c", "unet_digits", "-b", "solo", *overrides, cwd=trained, status=2)
    assert message in process.stderr


FLOAT64 = ("train.precision=fp64", "train.sync_batchnorm=true")


@pytest.fixture(scope="module")
def exact(trained) -> Path:
    """Two epochs on one rank in float64."""
    return train(trained, "exact", *FLOAT64, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fleet"])
def test_two_ranks_learn_what_one_rank_learns_with_dropout_and_pixels_without_a_class(trained, exact, backend):
    if backend == "fleet" and find_spec("paddle") is None:
        pytest.skip("no paddle")
    run = train(trained, f"two-{backend}", *FLOAT64, backend=backend, ranks=2, epochs=2)
    np.testing.assert_allclose(losses(run), losses(exact), rtol=1e-9)
    for one, other in zip(metrics(run), metrics(exact), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.slow
def test_liteseg_learns_the_same_on_torch_and_paddle(trained):
    if find_spec("paddle") is None:
        pytest.skip("no paddle")
    lite = ("model.name=liteseg", "model.options={width: 8, blocks: 1, decoder: [4, 6, 8]}", *FLOAT64)
    curves = [
        losses(train(trained, f"lite-{name}", *lite, f"backend.options={{framework: {name}}}", epochs=2))
        for name in ("torch", "paddle")
    ]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-9)


@pytest.mark.slow
def test_a_job_resumed_after_an_epoch_ends_as_if_it_had_not_been_interrupted(trained, exact):
    run = train(trained, "cut", *FLOAT64, "schedule.horizon_epochs=2", epochs=2)
    first = sorted((run / "checkpoints").iterdir())[0]
    assert "000004" in first.name
    for later in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later) if later.is_dir() and not later.is_symlink() else later.unlink()
    assert losses(run) == losses(exact)
    mtrain("train", "--resume", str(first), cwd=trained)
    assert losses(run)[-4:] == losses(exact)[-4:]
    assert metrics(run)[-1] == metrics(exact)[-1]


@pytest.fixture(scope="module")
def of_ddp(trained) -> dict[str, str]:
    """Digests of the weights after eight updates on two ranks of ddp, by model; each is trained when it is first asked for."""
    return {}


LITE = (
    "model.name=liteseg",
    "model.options={width: 8, blocks: 1, decoder: [4, 6, 8], auxiliary: 0.4, loss: {dice: 0.5, ohem: {}}}",
)


def digests(run: Path) -> tuple[str, str]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["weights_sha256"], summary["ema_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [("horovod", "{}"), ("deepspeed", "{stage: 1}"), ("deepspeed", "{stage: 2}"), ("deepspeed", "{stage: 3}")],
)
@pytest.mark.parametrize("model", ["unet", "liteseg"])
def test_other_backends_end_with_the_bits_of_ddp(trained, of_ddp, backend, options, model):
    if find_spec(backend) is None:
        pytest.skip(f"no {backend}")
    values = ("train.sync_batchnorm=true", *(LITE if model == "liteseg" else ()))
    if model not in of_ddp:
        of_ddp[model] = digests(train(trained, f"bits-ddp-{model}", *values, backend="ddp", ranks=2, epochs=2))
    name = f"bits-{backend}-{model}-{options.strip('{}')[-1:]}"
    run = train(trained, name, *values, f"backend.options={options}", backend=backend, ranks=2, epochs=2)
    assert digests(run) == of_ddp[model]


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the shape of Pascal VOC: images of several sizes, masks with its palette, and the two lists."""
    root, rng = tmp_path_factory.mktemp("voc"), np.random.default_rng(0)
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for split, count in (("train", 8), ("val", 3)):
        names = [f"2007_{split}_{number:06d}" for number in range(count)]
        for number, name in enumerate(names):
            height, width = 60 + 8 * (number % 3), 90
            mask = np.zeros((height, width), np.uint8)
            mask[10:40, 20:60] = 1 + number
            mask[8:10, 20:60] = 255  # the border that Pascal VOC draws around objects
            image = rng.integers(0, 120, (height, width, 3), dtype=np.uint8) + 10 * mask.clip(0, 12)[..., None]
            save_image(image.astype(np.uint8), root / f"JPEGImages/{name}.jpg")
            write_indices(mask, root / f"SegmentationClass/{name}.png")
        (root / f"ImageSets/Segmentation/{split}.txt").write_text("\n".join(names) + "\n")
    return root


@pytest.mark.job
@pytest.mark.parametrize(
    ("config", "stride"), [("unet_voc", 16), pytest.param("liteseg_voc", 32, marks=pytest.mark.slow)]
)
def test_the_configs_for_pascal_voc_plan_and_train_on_a_folder_of_its_shape(voc, tmp_path, config, stride):
    overrides = [
        f"data.root={voc}",
        f"data.image_size={2 * stride}",
        "data.workers=0",
        "train.batch_size=4",
        "train.updates=2",
    ]
    words = [word for value in (*overrides, "report.tensorboard=false") for word in ("-o", value)]
    arguments = ["-c", config, "-b", "solo", "--nproc-per-node", "1", *words]
    assert "solo" in mtrain("plan", *arguments, cwd=tmp_path).stdout
    mtrain("train", *arguments, "--name", "tiny", cwd=tmp_path)
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert summary["updates"] == 2
    assert {"miou", "iou/background"} <= set(summary["best"])


def test_a_network_can_learn_from_another_kind_of_network(trained):
    values = ("model.name=liteseg", "model.options={width: 8, blocks: 1, decoder: [4, 6, 8]}")
    train(trained, "taught", *values, "train.distil.teacher=runs/small")
    assert min(record["losses"]["distil"] for record in records(trained / "runs/taught", "update")) > 0
