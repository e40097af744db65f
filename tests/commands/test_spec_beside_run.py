"""`--run R` together with `-c X`: the spec of X counts, what differs from that of the run is told, another model refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mtrain
from mtrain.commands import main
from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.errors import MtrainError
from mtrain.jobs import job
from mtrain.jobs.job import Outcome
from mtrain.jobs.run.request_files import write_spec
from mtrain.spec import config

RUN = "_BASE_: digits.yml\ndata: {image_size: 64}\n"
OTHER = "_BASE_: digits.yml\ndata: {image_size: 96}\noptimizer: {learning_rate: 0.5}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `runs/r` and a spec that has another size of images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "other.yml").write_text(OTHER)
    loaded = config.load("run.yml", environ={})
    run = tmp_path / "runs/r"
    run.mkdir(parents=True)
    write_spec(loaded, run)
    store = Checkpoints(run / "checkpoints", keep_last=2, keep_best=0, asynchronous=False)
    state = State(weights={"w": np.zeros(4, dtype=np.float32)})
    store.save(state, Progress(update=1), score=None, spec=json.loads(config.resolved_json(loaded.spec)), extra={})
    Image.new("RGB", (64, 64)).save(tmp_path / "p.png")
    return tmp_path


COMMANDS = {
    "evaluate": [],
    "predict": ["p.png"],
    "export": ["--format", "safetensors"],
    "prune": ["--target", "0.5", "-o", "pruned"],
    "quantise": ["-o", "x.onnx"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_spec_of_another_model_is_refused(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--run", "runs/r", "-c", "vit_digits", *COMMANDS[command]]) == 2
    told = capsys.readouterr().err
    assert "vit" in told
    assert "yolov5n" in told
    assert "leave -c out" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_differences_that_matter_are_told_and_no_others(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    seen = []

    def stop(loaded: config.Loaded, *_args: object, **_rest: object) -> Outcome:
        seen.extend([*loaded.notes, str(loaded.spec.data.image_size)])
        raise MtrainError("stopped by the test")

    monkeypatch.setattr(job, "evaluate", stop)
    for user in ("mtrain.jobs.hosts.this_host", "mtrain_deploy.exporting.job"):
        monkeypatch.setattr(f"{user}.run_job", stop)
    monkeypatch.setattr("mtrain_deploy.commands.prune._run", stop)
    main([command, "--run", "runs/r", "-c", "other.yml", *COMMANDS[command]])
    told = capsys.readouterr().err + "\n".join(seen)
    assert "data.image_size 64 there, 96 here (other.yml:2)" in told
    assert "optimizer.learning_rate" not in told
    if command in ("evaluate", "predict", "prune"):
        assert seen[-1] == "96", "the spec that is given is the one that is used"


def test_functions_of_python_tell_it_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = []

    def evaluated(loaded: config.Loaded, **_rest: object) -> Outcome:
        notes.extend(loaded.notes)
        return Outcome(code=0)

    monkeypatch.setattr(job, "evaluate", evaluated)
    mtrain.evaluate("other.yml", run="runs/r")
    assert any("data.image_size 64 there, 96 here" in note for note in notes)
    notes.clear()
    mtrain.evaluate(run="runs/r")
    assert notes == []
    mtrain.evaluate("run.yml", run="runs/r")
    assert any("they agree" in note for note in notes)
