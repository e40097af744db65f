"""`mtrain checkpoint` shows what was saved and whether it is intact."""

import numpy as np
import pytest

from mtrain.commands import main
from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.jobs.resume.find import AUTO, latest_run
from mtrain.system import runfolder


@pytest.fixture
def run(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints", keep_last=3, keep_best=0, asynchronous=False)
    for update, score in ((10, 0.5), (20, None)):
        state = State(weights={"a.weight": np.zeros((2, 3), dtype=np.float32)}, counters={"updates": update})
        store.save(state, Progress(update=update), score=score, spec={"model": {"name": "yolov5n"}}, extra={})
    return tmp_path


def test_list_names_each_checkpoint_and_marks_damaged_ones(run, capsys):
    (run / "checkpoints" / "step-00000020" / "ema.safetensors").unlink()
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["step-00000010", "10", "0.5000", "0.0", "MiB", "whole"]
    assert lines[2].endswith("damaged")


def test_verify_gives_0_for_intact_and_1_for_damaged(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": intact") == 2
    (run / "checkpoints" / "step-00000010" / "state.json").write_text("{}")
    assert main(["checkpoint", "verify", str(run / "checkpoints")]) == 1
    assert "state.json: 2 bytes, expected" in capsys.readouterr().out


def test_show_tells_what_the_newest_holds(run, capsys):
    assert main(["checkpoint", "show", str(run), "--arrays"]) == 0
    shown = capsys.readouterr().out
    for part in ("step-00000020", "update       20", "yolov5n", "1 arrays, 6 numbers", "a.weight  float32  (2, 3)"):
        assert part in shown


def test_a_folder_without_checkpoints_is_wrong_use(tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_resume_alone_means_the_run_that_was_started_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert latest_run(None, AUTO) == AUTO
    runfolder.create(tmp_path / "runs", "cells")
    runfolder.create(tmp_path / "runs", "cells")
    assert latest_run(None, AUTO) == "runs/cells-2"
    assert latest_run("cells.yml", AUTO) == AUTO
    assert latest_run(None, "runs/cells") == "runs/cells"
    (tmp_path / "mtrain.yml").touch()
    assert latest_run(None, AUTO) == AUTO
