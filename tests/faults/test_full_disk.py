"""A disk that takes no more: told when it happens, or before the job starts."""

import resource
import shutil

from mtrain.commands import main
from tests.faults.conftest import Runner

LIMIT_BYTES = 2_000_000
"""Of one file: records and logs fit, the weights of YOLOv5n do not."""


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))


def test_a_save_that_fails_beside_the_loop_ends_the_job_then_and_not_at_the_next_save(runner: Runner):
    more = ["-o", "train.updates=100000", "-o", "checkpoint.every_updates=20", "-o", "checkpoint.every_epochs=null"]
    process = runner.start([*runner.arguments(name="full", backend="solo", ranks=1), *more], preexec_fn=limit_files)
    code, output = runner.finish(process)
    assert code == 1, output
    assert "checkpoint step-00000020 could not be written" in output
    assert "there is no earlier one. Make room (or set checkpoint.keep_last lower), then go on with --resume" in output
    assert "Traceback" not in output
    assert 19 <= runner.updates("full")[-1]["update"] < 39


def test_a_disk_without_room_for_the_checkpoints_is_told_before_anything_starts(runner: Runner, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 0, 50 << 20))
    assert main(["train", *runner.arguments(name="small", backend="solo", ranks=1)]) == 2
    stderr = capsys.readouterr().err
    assert "50.0 MiB free on its disk, and the checkpoints of this job need " in stderr
    assert "(checkpoint.keep_last 3, keep_best 1, and the one that is being written); make room, keep fewer" in stderr
    assert not (runner.folder / "runs" / "small").exists()
