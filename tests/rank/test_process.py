"""The files that one rank leaves, and the state from which it starts."""

import json

import numpy as np
import pytest

from mtrain.core.checkpoint.store import Checkpoints, progress_of
from mtrain.core.interfaces import Progress, State
from mtrain.errors import Interrupted
from mtrain.rank import process
from mtrain.rank.assembly import _left_by
from mtrain.system.runfolder import RunFolder
from mtrain.weights.reading import read


def test_an_error_is_left_while_the_backend_is_entered_and_only_once(tmp_path, capfd):
    run = RunFolder(tmp_path)
    leave = process.Leaving(run, 3)
    with pytest.raises(ValueError, match="upside down"), _left_by(leave):
        raise ValueError("upside down")
    left = run.failures / "rank-3.json"
    content = left.read_text()
    error = ValueError("later")
    leave(error)
    assert json.loads(left.read_text())["message"] == "later"
    left.write_text(content)
    leave(error)
    assert left.read_text() == content
    assert capfd.readouterr().err.count("upside down") == 2  # the traceback shows the line too


def test_an_error_that_cannot_be_written_is_still_printed(tmp_path, capfd):
    (tmp_path / "failures").write_text("a file where the folder should be")
    process.Leaving(RunFolder(tmp_path), 0)(Interrupted("ended from outside"))
    assert "ended from outside" in capfd.readouterr().err


def test_start_weights_can_be_those_of_a_checkpoint_the_averaged_ones_where_there_are_any(tmp_path):
    store = Checkpoints(tmp_path, keep_last=1, keep_best=0, asynchronous=False)
    state = State(weights={"a": np.zeros(2), "n": np.array(3)}, ema={"a": np.ones(2)})
    store.save(state, Progress(update=4, samples=8), score=None, spec={}, extra={})
    weights = read(tmp_path / "step-00000004").arrays
    assert {name: array.tolist() for name, array in weights.items()} == {"a": [1, 1], "n": 3}
    assert progress_of(tmp_path / "step-00000004") == Progress(update=4, samples=8)
