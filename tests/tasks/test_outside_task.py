"""A task, its data set and its model in a folder of their own train, evaluate, predict and compare: no file of mtrain knows them."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import mtrain
from mtrain.data.images.drawing import save_picture
from mtrain.errors import PluginError
from mtrain.rank import assembly

OUTSIDE = Path(__file__).parent / "outside"
ROOT = Path(mtrain.__file__).parent


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    shutil.copytree(OUTSIDE, tmp_path / "work", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_an_outside_task_trains_on_two_ranks_and_predicts(here):
    result = mtrain.train("spec.yml", backend="ddp", ranks=2, quiet=True)
    assert result.best.figures["error"] < 0.1
    assert (result.run_dir / "val_batch.jpg").is_file()
    assert mtrain.evaluate(run=result.run_dir, quiet=True).figures["error"] == pytest.approx(
        result.best.figures["error"]
    )
    save_picture(np.full((8, 8, 3), 204, np.uint8), Path("pictures/a.png"))
    (prediction,) = mtrain.predict("pictures", run=result.run_dir).predictions
    assert prediction["file_name"] == "a.png"
    assert prediction["value"] == pytest.approx(0.8, abs=0.15)


def test_it_is_listed_and_its_data_are_checked(here):
    line = ["plugins", "list", "tasks", "--json"]
    listed = {entry["name"]: entry["state"] for entry in json.loads(_mtrain(*line))}
    assert listed["brightness"] == "ready"
    assert "32 squares" in _mtrain("data", "check", "-c", "spec.yml")


def test_no_file_of_mtrain_names_it():
    texts = (file.read_text(encoding="utf-8") for file in ROOT.rglob("*") if file.suffix in (".py", ".toml", ".yml"))
    assert not any("grey_squares" in text or "BrightnessTask" in text for text in texts)


def test_a_kind_without_a_task_is_refused_with_the_known_ones(here):
    (here / "plugins.toml").write_text(
        (here / "plugins.toml").read_text().replace("tasks.brightness", "tasks.darkness")
    )
    with pytest.raises(PluginError, match=r"no task 'brightness' .*classification, .*detection"):
        assembly.open_task(mtrain.load_spec("spec.yml").spec)


def _mtrain(*words: str) -> str:
    import sys

    done = subprocess.run([sys.executable, "-m", "mtrain", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
