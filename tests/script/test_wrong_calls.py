"""A wrong argument of a function of mtrain: the user's own line, the nearest name, and the known ones; no frames of mtrain."""

import inspect
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mtrain
from mtrain.errors import ScriptError
from mtrain.rank.script.job import without_own_frames
from mtrain.rank.script.session import Session

HEAD = "from torch import nn\nimport mtrain\n"
PREPARE = "    model, optimizer = session.prepare(lambda: nn.Linear(4, 2), optimizer=mtrain.SGD(learning_rate=0.1))\n"
SCRIPTS = {
    "session": (HEAD + "with mtrain.session(framwork='torch') as session:\n    pass\n", 3, "framwork", "framework"),
    "prepare": (
        HEAD + "with mtrain.session() as session:\n    session.prepare(modle=nn.Linear, optimiser=None)\n",
        4,
        "modle",
        "build",
    ),
    "batches": (
        HEAD + "with mtrain.session() as session:\n" + PREPARE + "    session.batches([0], batch_size=8)\n",
        5,
        "batch_size",
        "global_batch",
    ),
}


@pytest.mark.job
@pytest.mark.parametrize("call", SCRIPTS)
def test_a_script_with_a_wrong_keyword_ends_with_its_own_line(tmp_path: Path, call: str) -> None:
    text, line, given, known = SCRIPTS[call]
    script = tmp_path / "r.py"
    script.write_text(text)
    words = [sys.executable, "-m", "mtrain", "run", "-b", "solo", "-o", "report.plots=false", "r.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 2, told
    assert f"{script}:{line}: session" in told
    assert given in told
    assert known in told
    assert "Traceback" not in told
    assert str(Path(mtrain.__file__).parent) not in told


@pytest.mark.job
def test_another_error_of_a_script_begins_with_its_own_line_before_a_session_too(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import mtrain\nprint(1 / 0)\n")
    words = [sys.executable, "-m", "mtrain", "run", "-b", "solo", "-o", "report.plots=false", "r.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert f'{tmp_path / "r.py"}", line 2' in told
    assert "ZeroDivisionError" in told
    assert str(Path(mtrain.__file__).parent) not in told


FUNCTIONS = [name for name in mtrain.__all__ if inspect.isfunction(getattr(mtrain, name)) and name != "serve"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_the_line_and_its_names(name: str) -> None:
    function: Callable[..., Any] = getattr(mtrain, name)
    here = f"{__file__}:{inspect.currentframe().f_lineno + 2}: "  # type: ignore[union-attr]
    with pytest.raises(ScriptError) as raised:
        function(nothing_like_it=1)
    assert str(raised.value).startswith(f"{here}{name}(nothing_like_it=...)")
    for known in inspect.signature(function).parameters:
        assert known in str(raised.value)


def test_rules_and_curves_know_the_names_of_other_libraries() -> None:
    rules: list[Any] = [mtrain.SGD, mtrain.AdamW, mtrain.LAMB]
    for rule in rules:
        with pytest.raises(TypeError, match=rf"{rule.__name__}\(lr=...\).*did you mean 'learning_rate'"):
            rule(lr=0.1)
    curve: Any = mtrain.Cosine
    with pytest.raises(TypeError, match="did you mean 'warmup'"):
        curve(warmups=3)
    assert pickle.loads(pickle.dumps(mtrain.SGD(learning_rate=0.5))) == mtrain.SGD(learning_rate=0.5)


def test_a_missing_argument_is_named_and_errors_of_own_code_stay_what_they_are() -> None:
    session: Any = Session.__new__(Session)
    with pytest.raises(ScriptError, match=r"session.keep: missing a required argument: 'kept_object'"):
        session.keep("a")

    def own() -> None:
        raise TypeError("of the user's own function")

    from mtrain.spec.calls import explain_calls

    @explain_calls
    def takes(function: Callable[[], None]) -> None:
        function()

    with pytest.raises(TypeError, match="of the user's own") as raised:
        takes(own)
    assert not isinstance(raised.value, ScriptError)


PADDLE = """
import numpy as np
import paddle
import mtrain
from mtrain.errors import ScriptError

class Rows(paddle.io.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        row = np.random.default_rng(index).standard_normal(4).astype(np.float32)
        return row, int(row.sum() > 0)

def told(call):
    try:
        call()
    except ScriptError as error:
        print("told:", error)

with mtrain.session(framework="paddle") as session:
    model, optimizer = session.prepare(lambda: paddle.nn.Linear(4, 2), optimizer=mtrain.SGD(learning_rate=0.1))
    told(lambda: session.batches(paddle.io.DataLoader(Rows(), batch_size=None), epochs=2))
    for number, (rows, targets) in enumerate(session.batches(paddle.io.DataLoader(Rows(), batch_size=8), updates=3)):
        told(lambda: optimizer.set_lr(0.1))
        rows.stop_gradient = False
        loss = paddle.nn.functional.cross_entropy(model(rows), targets)
        paddle.grad([loss], [rows], retain_graph=True)  # changes no gradient of the model
        if number == 1:
            loss.backward(retain_graph=True)
        optimizer.update(loss)
        print("updated", number)
"""


@pytest.mark.job
def test_a_script_of_paddle_is_told_the_same(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(PADDLE)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "r.py"]
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    told = ended.stdout + ended.stderr
    assert "a DataLoader with batch_size=None given, whose data set makes batches itself" in told
    assert "optimizer.set_lr: " in told
    assert "schedule=mtrain.Cosine()" in told
    assert "updated 0" in told, told
    assert "updated 1" not in told
    assert "loss.backward(): leave it out: optimizer.update(loss)" in told


def error_in(file: str, text: str) -> Exception:
    """Return the error of a script's code that would lie at ``file``, without the frame of this function."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        exec(compile(text, file, "exec"), {"mtrain": mtrain})
    trace = caught.tb
    while trace.tb_frame.f_code.co_filename != file:
        assert trace.tb_next is not None
        trace = trace.tb_next
    assert isinstance(caught.value, Exception)
    return caught.value.with_traceback(trace)


def test_a_script_whose_path_begins_like_the_packages_is_still_the_users_own() -> None:
    file = f"{Path(mtrain.__file__).parent}_mine/train.py"
    wrong = error_in(file, "\n\nmtrain.SGD(learning_rat=0.1)")
    assert str(wrong).startswith(f"{file}:3: ")
    later = without_own_frames(error_in(file, "import json\njson.loads('no')"))
    assert traceback.extract_tb(later.__traceback__)[0].filename == file
