"""What mtrain does where nothing is installed but its requirements and torch."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.distribution.base_environment import base_requirements, make
from tests.starts import starts_processes

SCRIPTS = Path(__file__).parents[1] / "script" / "scripts"
BASE = {"click", "mtrain-trace", "numpy", "pydantic", "pyyaml", "psutil", "rich", "safetensors", "stevedore"}
ALONE = ("cv2", "PIL", "simplejpeg", "matplotlib", "jinja2", "sklearn", "tensorboard", "faster_coco_eval", "lxml")


SCRIPT = """
import numpy as np
import torch
import mtrain

class Points:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.full(4, index / 64, np.float32)

with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Linear(4, 1), optimizer=mtrain.SGD(learning_rate=0.1))
    for inputs in session.batches(Points(), global_batch=16, epochs=2):
        optimizer.update(model(inputs).square().mean())
"""


@pytest.fixture(scope="module")
@starts_processes
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("base") / "venv")


def mtrain(python: Path, here: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([python, "-m", "mtrain", *words], cwd=here, capture_output=True, text=True, timeout=300)


def test_an_installation_without_an_extra_brings_few_packages():
    assert set(base_requirements()) == BASE


def test_the_environment_has_no_package_of_an_extra(python, tmp_path):
    code = f"from importlib.util import find_spec; print([name for name in {ALONE} if find_spec(name)])"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--help"], ["config", "show", "-c", "digits"], ["plugins", "list"]])
def test_what_needs_no_extra_works_without_one(python, tmp_path, words):
    done = mtrain(python, tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_names_the_extra_that_its_job_needs(python, tmp_path):
    done = mtrain(python, tmp_path, "plan", "-c", "digits", "--backend", "ddp")
    assert done.returncode == 0
    assert "mtrain.rank.worker" in done.stdout
    assert "[vision]" in done.stderr


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["train", "-c", "digits"], "[vision]"),
        (["train", "-c", "digits", "-o", "report.reporters.mlflow=true"], "[vision,mlflow]"),
        (["run", "-o", "report.reporters.tensorboard=true", str(SCRIPTS / "train_torch.py")], "[tensorboard]"),
    ],
)
def test_a_job_is_refused_in_one_line_that_names_the_missing_extra(python, tmp_path, words, extras):
    done = mtrain(python, tmp_path, *words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert extras in line
    assert not (tmp_path / "runs").exists()


def test_data_sets_are_neither_checked_nor_made_without_their_extra(python, tmp_path):
    for words in (["check", "-c", "digits"], ["make", "digits", "made"]):
        done = mtrain(python, tmp_path, "data", *words)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, "vision" in line) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_the_extras_that_are_missing(python, tmp_path):
    done = mtrain(python, tmp_path, "doctor", "--quick", "--json")
    remedies = " ".join(row["remedy"] for row in json.loads(done.stdout)["findings"])
    assert all(f"[{extra}]" in remedies for extra in ("vision", "tensorboard", "report"))


@pytest.mark.slow
def test_a_script_is_compared_without_an_extra(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = mtrain(
        python,
        tmp_path,
        *("compare", "--backends", "solo,ddp", "--updates", "4", "--rounds", "0"),
        *("--script", str(script)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "compare" / "compare.json").is_file()


def test_a_script_runs_without_an_extra_and_says_what_is_not_written(python, tmp_path):
    done = mtrain(python, tmp_path, "run", "--backend", "solo", str(SCRIPTS / "train_torch.py"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "train_torch" / "summary.json").read_text(encoding="utf-8"))
    assert summary["updates"] == 30
    assert "[tensorboard]" in done.stdout
    assert "[report]" in done.stdout
