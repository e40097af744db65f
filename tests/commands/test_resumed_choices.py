"""A resumed run keeps what was chosen for it, says what differs, and runs no code that only its folder names."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mtrain.commands import main
from mtrain.errors import SpecError, UsageError
from mtrain.spec import config
from tests.commands.run_folders import make_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
SCRIPT = """
import os, time
import numpy as np
from torch import nn
import mtrain

class Rows:
    def __len__(self):
        return 48
    def __getitem__(self, index):
        row = np.random.default_rng(index).standard_normal(4).astype(np.float32)
        return row + np.random.standard_normal(4).astype(np.float32), int(row.sum() > 0)

with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: nn.Linear(4, 2), optimizer=mtrain.SGD(learning_rate=0.1))
    for rows, targets in session.batches(Rows(), global_batch=8, epochs=2):
        time.sleep(float(os.environ.get("DELAY_S", "0")))
        optimizer.update(nn.functional.cross_entropy(model(rows), targets))
"""
CHOSEN = ("--backend", "solo", "--seed", "42", "-o", "checkpoint.every_updates=4", "train.clip_norm=0.5")


def command(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "mtrain", *words)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT | variables, timeout=300)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


def killed_run(folder: Path, *words: str, name: str) -> None:
    """Start a job that leaves a checkpoint, and end all its processes with SIGKILL."""
    line = [sys.executable, "-m", "mtrain", *words]
    process = subprocess.Popen(
        line, cwd=folder, env=ENVIRONMENT | {"DELAY_S": "0.3"}, start_new_session=True, stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: any((folder / f"runs/{name}/checkpoints").glob("step-*/state.json")) or process.poll() is not None)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Ranks have sessions of their own, and end when their starter has; the lock of the run is free then.
    until(lambda: not ranks_of(folder / f"runs/{name}"))


def ranks_of(run: Path) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(run.resolve()) in line or (f"runs/{run.name}" in line and "worker" in line)]


def weights(run: Path) -> dict[str, np.ndarray]:
    newest = max((run / "checkpoints").glob("step-*"))
    return dict(load_file(newest / "weights.safetensors"))


@pytest.mark.job
def test_a_killed_script_goes_on_with_its_own_job_to_the_bits_of_the_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(SCRIPT)
    whole = command("run", *CHOSEN, "--name", "whole", "r.py", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed_run(tmp_path, "run", *CHOSEN, "--name", "cut", "r.py", name="cut")
    resumed = command("run", "--resume", "runs/cut", "r.py", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    expected, actual = weights(tmp_path / "runs/whole"), weights(tmp_path / "runs/cut")
    assert expected.keys() == actual.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name])
    spec = json.loads((tmp_path / "runs/cut/spec.json").read_text())
    assert (spec["backend"]["name"], spec["train"]["seed"], spec["train"]["clip_norm"]) == ("solo", 42, 0.5)
    chosen = json.loads((tmp_path / "runs/cut/chosen.json").read_text())
    assert {"backend.name", "train.seed", "train.clip_norm"} <= set(chosen["paths"]), "they stay for the next resume"


# ----------------------------------------------------------------------------------------- without starting anything
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict, str]:
    """Return the plan, and what was said beside it."""
    assert main([*words]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    return (json.loads(told.out) if "--json" in words else {"text": told.out}), told.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/first`: a job of `own.yml` with typed choices."""
    folder = tmp_path_factory.mktemp("typed")
    text = "_BASE_: vit_digits\ntrain: {updates: 2, epochs: null, seed: 3}\nevaluate: {at_end: false, every_epochs: null}\n"
    (folder / "own.yml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_run("own.yml", "first", "backend.name=solo", "train.seed=42", "optimizer.learning_rate=0.01")
    return folder


def test_choices_of_a_run_stay_beside_the_spec_that_is_given_again_and_changes_are_told(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    for resume in ("runs/first", "auto"):
        name = () if resume != "auto" else ("--name", "first")
        plan, told = planned(capsys, "plan", "-c", "own.yml", "--resume", resume, *name)
        assert "solo" in plan["text"]
        assert "not as in the run" not in told
    _, told = planned(capsys, "plan", "-c", "own.yml", "--resume", "runs/first", "--seed", "7", "-b", "ddp")
    assert "train.seed 42 there, 7 here (--seed 7)" in told
    assert "backend.name solo there, ddp here" in told
    assert "optimizer.learning_rate" not in told
    _, told = planned(capsys, "plan", "--resume", "runs/first", "--seed", "7")
    assert "train.seed 42 there, 7 here" in told
    (run / "other.yml").write_text((run / "own.yml").read_text() + "optimizer: {weight_decay: 0.5}\n")
    _, told = planned(capsys, "plan", "-c", "other.yml", "--resume", "runs/first")
    assert "optimizer.weight_decay" in told, "what the user's own spec says now, and did not say then"


def test_a_run_of_train_is_not_continued_by_a_script(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    (run / "r.py").write_text(SCRIPT)
    assert main(["run", "--resume", "runs/first", "--dry-run", "r.py"]) == 2
    assert "mtrain train --resume runs/first" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- code of a run folder
@pytest.mark.parametrize("what", ["backend.python", "plugins", "beside"])
@pytest.mark.parametrize(
    "words", [("plan", "--resume"), ("train", "--resume"), ("evaluate", "--run"), ("config", "show", "-c")]
)
def test_a_run_folder_runs_no_code_that_only_it_names(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    words: tuple,
) -> None:
    shutil.copytree(run / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/first"
    mark = tmp_path / "ran"
    evil = folder / "evil.py"
    evil.write_text(f"#!{sys.executable}\nopen({str(mark)!r}, 'w')\nclass Evil: ...\n")
    evil.chmod(0o755)
    policy = '[models.evil]\nmodule = "evil:Evil"\n'
    text = (folder / "spec.yml").read_text()
    assert "python: null" in text
    if what == "backend.python":
        (folder / "spec.yml").write_text(text.replace("python: null", f"python: {evil}"))
    elif what == "plugins":
        (folder / "policy.toml").write_text(policy)
        (folder / "spec.yml").write_text(text.replace("plugins: null", f"plugins: {folder / 'policy.toml'}"))
    else:
        (folder / "plugins.toml").write_text(policy)
    target = "runs/first/spec.yml" if words[0] == "config" else "runs/first"
    assert main([*words, target]) == 2
    told = capsys.readouterr().err
    path = what if what != "beside" else "plugins"
    assert f"-o {path}=" in told
    assert "not trusted" in told
    assert not mark.exists()


def test_code_that_is_typed_for_a_run_folder_is_used(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    loaded = config.load("runs/first/spec.yml", overrides=[f"backend.python={sys.executable}"], environ={})
    assert loaded.spec.backend.python == sys.executable


def test_a_policy_of_the_current_folder_is_the_users_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugins.toml").write_text("")
    spec = tmp_path / "runs/first/spec.yml"
    spec.write_text(spec.read_text().replace("plugins: null", f"plugins: {tmp_path / 'plugins.toml'}"))
    assert config.load(str(spec), environ={}).spec.plugins == str(tmp_path / "plugins.toml")
    monkeypatch.chdir(tmp_path / "runs/first")
    shutil.move(tmp_path / "plugins.toml", tmp_path / "runs/first/plugins.toml")
    with pytest.raises(SpecError, match="not trusted"):
        config.load("spec.yml", environ={})


def test_typed_code_of_a_run_is_typed_again(here: Path) -> None:
    """A reference that was typed for a run is code that only its folder names when the run is resumed."""
    (here / "own.yml").write_text("_BASE_: vit_digits\n")
    values = config.RunValues(file="runs/x/spec.yml", values={"model.name": "/x/nets.py:Net", "train.seed": 5})
    with pytest.raises(SpecError, match=r"runs/x/spec.yml model.name: names code, /x/nets.py:Net"):
        config.load("own.yml", environ={}, run=values)
    assert issubclass(SpecError, UsageError)
