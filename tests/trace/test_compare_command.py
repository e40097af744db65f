"""Both commands compare the same traces to the same text, and their exit codes are for continuous integration."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain_trace import recorder, running
from mtrain_trace.reading import TraceError

pytestmark = pytest.mark.job


def write(
    folder: Path, *, rate: float = 0.1, loss: float = 1.0, frozen: bool = False, form: int = recorder.FORM
) -> None:
    """Write the trace of one rank and two updates by hand."""
    rank = folder / "rank-00000-host-1"
    rank.mkdir(parents=True)
    optimizer = {
        "rule": "SGD",
        "groups": [["w"]],
        "shapes": {"w": [1]},
        "dtypes": ["float32"],
        "sharded": False,
        "unseen": [],
    }
    process = {"form": form, "rank": 0, "ranks": 1, "torch": "2", "optimizers": [optimizer]}
    (rank / "process.json").write_text(json.dumps(process))
    row = {"digest": "0" * 16, "norm": 1.0, "sketch": [0.0] * 16}
    lines = []
    for number in (1, 2):
        micro = {"loss": loss, "samples": ["a"], "targets": [], "modes": [0, 1], "autocast": None}
        update: dict[str, Any] = {"update": number, "optimizer": 0, "rates": [{"lr": rate if number == 2 else 0.1}]}
        update |= {"steps": None, "rng": None, "weights_changed_outside": False, "micro_batches": [micro], "clip": None}
        lines.append(json.dumps({**update, "weights": row, **({} if frozen else {"gradients": row})}))
    (rank / "updates.jsonl").write_text("\n".join(lines) + "\n")


def run(here: Path, module: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, "compare", *words]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "one")
    write(tmp_path / "two", rate=0.2)
    write(tmp_path / "rounded", loss=1.0000001)
    return tmp_path


def test_mtrain_compare_prints_what_mtrain_trace_prints(folder: Path) -> None:
    ours, small = run(folder, "mtrain", "one", "two"), run(folder, "mtrain_trace", "one", "two")
    assert ours.stdout == small.stdout
    assert "DIFFERENT: optimizer settings first in update 2" in ours.stdout
    assert (ours.returncode, small.returncode) == (1, 1)


@pytest.mark.smoke
def test_the_exit_code_is_0_for_the_same_and_for_rounding_unless_bits_are_asked_for(folder: Path) -> None:
    assert run(folder, "mtrain", "one", "one").returncode == 0
    assert run(folder, "mtrain_trace", "one", "rounded").returncode == 0
    assert run(folder, "mtrain_trace", "one", "rounded", "--bits").returncode == 1


def test_an_optimizer_whose_arrays_have_no_gradient_at_all_is_named(folder: Path) -> None:
    write(folder / "frozen", frozen=True)
    done, ours = run(folder, "mtrain_trace", "one", "frozen"), run(folder, "mtrain", "one", "frozen")
    assert (done.returncode, ours.returncode) == (1, 1)
    assert done.stdout == ours.stdout
    assert "for each array, record both again with: mtrain-trace run --at 1 ..." in done.stdout
    assert "DIFFERENT: the gradient first in update 1" in done.stdout
    assert "No array that the optimizer of B holds has a gradient" in done.stdout


def test_traces_of_another_form_are_refused_with_the_remedy(folder: Path) -> None:
    write(folder / "older", form=recorder.FORM - 1)
    for words in (("older", "one"), ("one", "older")):
        done = run(folder, "mtrain_trace", *words)
        assert done.returncode == 2
        assert f"older: is a trace of form 1, and this mtrain-trace reads form {recorder.FORM} alone" in done.stderr
        assert "record the training again" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--backends is missing; or give two folders of trainings that have ended"),
        (("one",), "one: expected two or more folders"),
        (
            ("one", "two", "-b", "ddp"),
            "one two --backends: expected folders of trainings that have ended, or --backends and no folder",
        ),
        (("one", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_wrong_use_is_one_error(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = run(folder, "mtrain", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_before_the_training_and_ends_no_process_with_a_traceback(tmp_path, monkeypatch, capsys):
    class Full:
        def __init__(self, **options: Any) -> None:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(running.tempfile, "TemporaryFile", Full)
        with pytest.raises(TraceError, match=r"out: cannot be written: No space left on device; make room"):
            running.run([sys.executable, "-c", "open('ran', 'w')"], tmp_path / "out", running.RecordingSettings())
    assert list(tmp_path.iterdir()) == []
    kept = recorder.Recorder(str(tmp_path / "out"), every=1)

    def fails() -> None:
        raise OSError(28, "No space left on device")

    kept.before_close(fails)
    kept.close()
    assert "the trace cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
