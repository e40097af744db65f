"""Torch and Paddle train the same model from the same weights on the same images, and go on from each other's
checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parity import jobs
from tests.parity.jobs import Setting, Trace
from tests.starts import starts_processes

MODELS = ("yolov5n", "ppyoloe_s")
FLOAT64 = 1e-9
"""Largest relative difference after up to 50 updates in float64."""
FIRST = 1e-5
"""In float32, of the first loss: the size of rounding."""


@pytest.fixture(scope="session")
@starts_processes
def data(tmp_path_factory) -> Path:
    return jobs.make_data(tmp_path_factory.mktemp("parity") / "data")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def trained(folder, data):
    """Each job is run once a session."""
    results: dict[Setting, Trace] = {}

    def train(setting: Setting) -> Trace:
        if setting not in results:
            results[setting] = jobs.run(setting, folder, data)
        return results[setting]

    return train


QUICK = Setting(model="yolov5n", backend="ddp", ranks=2, precision="fp64", updates=16)
"""The job that runs every time, its warm-up and six more updates; the others take minutes."""


def settings(precision: str, updates: int = 50) -> list:
    rows = [
        Setting(model=model, backend=backend, ranks=ranks, precision=precision, updates=updates)
        for model in MODELS
        for backend, ranks in (("solo", 1), ("ddp", 2))
    ]
    return [pytest.param(row, id=row.name, marks=pytest.mark.slow) for row in rows]


@pytest.mark.parametrize("setting", [pytest.param(QUICK, id=QUICK.name), *settings("fp64")])
def test_updates_in_float64_are_the_same(trained, setting):
    ours, theirs = trained(setting), trained(jobs.partner(setting))
    actual = jobs.differences(ours, theirs)
    print(f"{setting.name}: " + ", ".join(f"{part} {value:.1e}" for part, value in actual.items()))
    assert len(ours.losses) == setting.updates
    assert max(actual.values()) <= FLOAT64, actual


@pytest.mark.parametrize("setting", settings("fp32", updates=12))
def test_in_float32_the_first_updates_differ_by_rounding_alone(trained, setting):
    ours, theirs = trained(setting), trained(jobs.partner(setting))
    gap = jobs.curve(ours.losses, theirs.losses)
    print(f"{setting.name}: first loss {gap[0]:.1e}, first ten {gap[:10].max():.1e}, last {gap[-1]:.1e}")
    assert gap[0] <= FIRST
    assert np.isfinite(theirs.losses).all()


def test_the_weights_do_move(trained):
    """Weights that do not change would agree too: these differ from their own average by far more than the bound."""
    arrays = trained(QUICK).arrays
    gaps = [jobs.relative(average, arrays["weights"][name]) for name, average in arrays["ema"].items()]
    assert np.median(gaps) > 1e5 * FLOAT64


@pytest.mark.parametrize(
    ("model", "writer", "reader"),
    [
        pytest.param("yolov5n", "ddp", "fleet", marks=pytest.mark.slow),
        pytest.param("ppyoloe_s", "fleet", "ddp", marks=pytest.mark.slow),
        pytest.param("yolov5n", "fleet", "ddp", marks=pytest.mark.slow),
        pytest.param("ppyoloe_s", "ddp", "fleet", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_under_the_other_backend(folder, data, trained, model, writer, reader):
    """Ten updates under ``writer``, ten more under ``reader``: what ``writer`` alone has after twenty."""
    whole = Setting(model=model, backend=writer, ranks=2, precision="fp64", updates=20, save_every=10)
    uninterrupted = trained(whole)
    continued = replace(whole, backend=reader, updates=20)
    target = folder / f"handed-{continued.name}"
    half = next((folder / whole.name / "checkpoints").glob("step-*10"))
    shutil.copytree(half, target / "checkpoints" / half.name)
    jobs.mtrain("train", *renamed(continued.arguments(folder, data), target.name), "--resume", str(target))
    ours = jobs.trace(target)
    assert json.loads((target / "summary.json").read_text())["backend"] == reader
    assert len(ours.losses) == 10
    actual = jobs.differences(
        replace(uninterrupted, losses=uninterrupted.losses[10:], norms=uninterrupted.norms[10:]), ours
    )
    print(f"{model}, {writer} to {reader}: " + ", ".join(f"{part} {value:.1e}" for part, value in actual.items()))
    assert max(actual.values()) <= FLOAT64, actual


def renamed(arguments: list[str], name: str) -> list[str]:
    """The arguments with another run folder."""
    return [name if before == "--name" else word for before, word in zip(["", *arguments], arguments, strict=False)]
