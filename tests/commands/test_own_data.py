"""The first commands of a person with their own data."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.spec.plugins import load, names
from tests import warm

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"
TINY = [
    *(
        "data.image_size=64",
        "data.workers=0",
        "train.epochs=1",
        "train.batch_size=2",
        "train.learning_rate_scaling=none",
    ),
    *("report.plots=false", "report.tensorboard=false"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with LabelImg's layout in ``cells`` and a spec in the README's form."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / "cells" / split).mkdir(parents=True)
        for name in (SMALL / "voc" / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
            shutil.copy(SMALL / "voc" / "Annotations" / f"{name}.xml", tmp_path / "cells" / split)
            shutil.copy(SMALL / "voc" / "JPEGImages" / f"{name}.jpg", tmp_path / "cells" / split)
    (tmp_path / "my.yml").write_text("_BASE_: yolov5n\ndata: {format: voc, root: cells}\n")
    return tmp_path


def train(*values: str) -> subprocess.CompletedProcess[str]:
    words = ("train", "-c", "my.yml", "--backend", "solo", "--name", "r", "-o", *TINY, *values)
    return warm.run(*words, cwd=Path.cwd(), env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"})


@pytest.mark.smoke
@pytest.mark.job
def test_the_readmes_form_trains_on_own_data_without_an_evaluation_split(here: Path) -> None:
    shutil.rmtree(here / "cells" / "val")
    results = train("evaluate.enabled=false", "data.augment.multi_scale=0.5")
    assert results.returncode == 0, results.stdout + results.stderr
    assert "nothing is evaluated (evaluate.enabled is false): the last checkpoint counts as best" in results.stdout
    summary = json.loads((here / "runs" / "r" / "summary.json").read_text())
    assert (summary["updates"], summary["best"]) == (2, {})
    assert summary["best_checkpoint"] == summary["newest_checkpoint"] is not None


@pytest.mark.job
def test_an_evaluation_split_without_boxes_is_told_and_never_the_best(here: Path) -> None:
    for file in (here / "cells" / "val").glob("*.xml"):
        text = file.read_text()
        file.write_text(text[: text.index("<object>")] + "</annotation>")
    results = train("evaluate.max_detections=120")
    assert results.returncode == 0, results.stdout + results.stderr
    message = "no boxes in the evaluation split: there is nothing to score"
    assert f"data.val: {message}, and the last checkpoint counts as best" in results.stdout
    assert f"update 2: not scored: {message}" in results.stdout
    assert "AP" not in results.stdout.replace("but AP counts", "")
    assert "best so far" not in results.stdout


def test_data_check_reads_a_folder_per_split(here: Path, capsys) -> None:
    assert main(["data", "check", "-c", "my.yml", "--output", str(here)]) == 0
    assert "7 image files, all whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train=nothing"],
            "data.train: no list or folder of images found; looked for cells/nothing; set data.train",
        ),
        (
            ["data.root="],
            "data.root: not given; data.format 'voc' needs the folder of the data set (-o data.root=FOLDER)",
        ),
        (["data.val=[]"], "data.val"),
        (["data.split=0.5", "data.val=val"], "split (0.5) takes the evaluation split from the training images"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(here: Path, capsys, overrides: list[str], message: str) -> None:
    assert main(["data", "check", "my.yml", *(word for value in overrides for word in ("-o", value))]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr


def test_an_empty_list_of_images_is_named(here: Path, capsys) -> None:
    (here / "cells" / "Annotations").mkdir()
    (here / "cells" / "none.txt").write_text("\n")
    assert main(["data", "check", "my.yml", "-o", "data.val=none.txt"]) == 2
    assert "data.val: no annotation files in cells/none.txt" in capsys.readouterr().err


def test_plugins_show_and_explain_list_the_options_of_a_format(here: Path, capsys) -> None:
    assert main(["plugins", "show", "voc"]) == 0
    shown = capsys.readouterr().out
    assert "ImageSets/Main/<split>.txt" in shown
    assert "use_difficult (true or false, default true): false: objects marked difficult" in shown
    assert main(["config", "explain", "data.options", "-c", "my.yml"]) == 0
    assert "of       data.format voc:\n    use_difficult (true or false, default true)" in capsys.readouterr().out
    assert main(["plugins", "show", "vco"]) == 2
    assert "no plugin 'vco'; did you mean 'voc'?" in capsys.readouterr().err


def test_the_data_page_names_every_option_of_every_format() -> None:
    page = DATA_PAGE.read_text(encoding="utf-8")
    for entry in names("datasets"):
        assert f"`data.format: {entry.name}`" in page or f"`{entry.name}`" in page, entry.name
        if entry.name in ("coco", "voc", "yolo"):
            for option in load("datasets", entry.name).Options.model_fields:
                assert f"| `{option}` |" in page, (entry.name, option)
