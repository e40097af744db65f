"""A task, its data set and its model in a folder of their own train, evaluate, predict and compare: no file of mtrain knows them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mtrain
from mtrain.data.images.drawing import save_image
from mtrain.errors import SpecError
from tests.sources import source_files

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    shutil.copytree(OUTSIDE, tmp_path / "work", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.job
def test_an_outside_task_trains_on_two_ranks_and_predicts(here):
    result = mtrain.train("spec.yml", backend="ddp", ranks=2, quiet=True)
    assert result.best.metrics["error"] < 0.1
    assert (result.run_dir / "val_batch.jpg").is_file()
    assert json.loads((result.run_dir / "details.json").read_text())["details"] == [], "a task needs to know no pages"
    assert "error" in (result.run_dir / "report.html").read_text()
    assert mtrain.evaluate(run=result.run_dir, quiet=True).metrics["error"] == pytest.approx(
        result.best.metrics["error"]
    )
    save_image(np.full((8, 8, 3), 204, np.uint8), Path("images/a.png"))
    (prediction,) = mtrain.predict("images", run=result.run_dir).predictions
    assert prediction["file_name"] == "a.png"
    assert prediction["value"] == pytest.approx(204, abs=40)  # in the unit of the task's own section


@pytest.mark.job
def test_it_is_listed_and_its_data_are_checked(here):
    line = ["plugins", "list", "tasks", "--json"]
    listed = {entry["name"]: entry["state"] for entry in json.loads(_mtrain(*line))}
    assert listed["brightness"] == "ready"
    assert "32 squares" in _mtrain("data", "check", "-c", "spec.yml")


@pytest.mark.job
def test_its_section_is_part_of_the_spec(here):
    loaded = mtrain.load_spec("spec.yml", overrides={"gauge.unit": "lx"})
    assert (loaded.spec.task, loaded.values["gauge"]) == ("brightness", {"white": 255.0, "unit": "lx"})
    assert str(loaded.origin("gauge.white")) == "spec.yml:4"
    explained = _mtrain("config", "explain", "data.darken", "-c", "spec.yml", "-o", "data.darken=0.5")
    assert explained.splitlines()[:2] == ["data.darken = 0.5", "  share by which training images become darker"]
    assert "over     0.1  from spec.yml:3" in explained
    assert "gauge.white = 2.0" in _mtrain("config", "explain", "gauge.white", "-c", "spec.yml", MTRAIN_GAUGE__WHITE="2")
    assert '"gauge"' in _mtrain("config", "schema")
    assert '"mosaic"' not in _mtrain("config", "schema", "-c", "spec.yml")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data.darkn", "unknown key; did you mean 'darken'?"),
        ("gauge.whit", "unknown key; did you mean 'white'?"),
        ("gauges.white", "gauges: unknown key; did you mean 'gauge'?"),
        (
            "data.augment.mosaic",
            "belongs to the task classification or detection or segmentation, and this job's task is brightness",
        ),
        ("gauge.white", "given -1, expected a number > 0"),
    ],
)
def test_mistakes_in_its_section_are_answered_like_any_other(here, path, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        mtrain.load_spec("spec.yml", overrides={path: -1})


def test_its_keys_are_no_others_and_are_left_out_where_another_task_is_chosen(here):
    (here / "other.yml").write_text("_BASE_: spec.yml\nmodel: {name: vit}\ndata: {format: digits_classes}\n")
    loaded = mtrain.load_spec("other.yml")
    assert loaded.spec.task == "classification"
    note = next(note for note in loaded.notes if "the task brightness; it is classification now (other.yml:" in note)
    assert note.startswith("data.darken (spec.yml:3), gauge.white (spec.yml:4), gauge.unit (spec.yml:4): left out")
    with pytest.raises(SpecError, match=r"gauge: unknown key: it belongs to the task brightness, and this job's"):
        mtrain.load_spec("digits", overrides={"gauge.white": 3, "plugins": str(here / "plugins.toml")})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("SquareDataSpec(DataSpec)", "SquareDataSpec(Section)", "is no subclass of mtrain.spec.model.DataSpec"),
        ('"gauge": GaugeSpec', '"plugins": GaugeSpec', "has the name of a value of every spec"),
        ('unit: str = Field(default="",', "unit: str = Field(", "is not valid without values (unit); give every key a"),
        (
            "(TaskBase):",
            ":\n    Options = NoOptions",
            "has no `divided`: derive the class from mtrain.tasks.base.TaskBase",
        ),
    ],
)
def test_a_section_that_cannot_be_part_of_a_spec_is_refused(here, before, after, message):
    text = (here / "outside_brightness.py").read_text()
    assert before in text
    name = f"outside_{abs(hash(after))}"
    (here / f"{name}.py").write_text(text.replace(before, after))
    (here / "plugins.toml").write_text((here / "plugins.toml").read_text().replace("outside_brightness", name))
    with pytest.raises(SpecError, match=re.escape(message)):
        mtrain.load_spec("spec.yml")


def test_no_file_of_mtrain_names_it():
    texts = (file.read_text(encoding="utf-8") for file in source_files(endings=(".py", ".toml", ".yml")).values())
    assert not any("grey_squares" in text or "BrightnessTask" in text for text in texts)


def test_a_kind_without_a_task_is_refused_with_the_known_ones(here):
    (here / "plugins.toml").write_text(
        (here / "plugins.toml").read_text().replace("tasks.brightness", "tasks.darkness")
    )
    with pytest.raises(SpecError, match=r"spec.yml:3 data.format: no task 'brightness' .*classification, .*detection"):
        mtrain.load_spec("spec.yml")


def _mtrain(*words: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
