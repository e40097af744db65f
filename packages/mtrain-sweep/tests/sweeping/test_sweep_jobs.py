"""`mtrain sweep` with real jobs: ended, killed and resumed, over backends and rank counts, and what it refuses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from tests.sweeping.jobs import SPACE, TINY

import mtrain
from mtrain.commands import main

MTRAIN = (sys.executable, "-m", "mtrain")
DEADLINE_S = 900


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny spec and a space, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "space.yml").write_text(yaml.safe_dump(SPACE))
    return tmp_path


def started(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen((*MTRAIN, "sweep", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def wait_for(what: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def commands(sweep: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the commands of the trials that run now."""
    below = psutil.Process(sweep.pid).children(
        recursive=True
    )  # they may be copies of a process that the sweep has started
    return [child for child in below if "train" in child.cmdline()]


LONGER = ("-o", "train.updates=600", "evaluate.every_updates=100", "checkpoint.every_updates=100")
"""So that there is time to disturb a trial."""


@pytest.mark.job
@pytest.mark.parametrize("trials", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sweep_that_is_ended_killed_and_resumed_has_the_table_of_an_undisturbed_one(
    trials: int, folder: Path
) -> None:
    settings = (
        "-c",
        "tiny.yml",
        *LONGER,
        "--space",
        "space.yml",
        "--trials",
        str(trials),
        "--pruner",
        "halving",
        "--out",
    )
    code, output = ended(started(*settings, "whole"))
    assert code == 0, output
    records = folder / "cut" / "trials" / f"{trials - 1:04d}" / "metrics.jsonl"

    process = started(*settings, "cut")  # SIGTERM: the trial saves
    wait_for(lambda: records.exists() and "evaluation" in records.read_text(), process)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143, output
    assert f"go on with: mtrain sweep --resume --out {folder}/cut" in output
    assert "saved at update" in output

    process = started("--resume", "--out", "cut")  # the sweep is killed, and its trial with it
    wait_for(lambda: commands(process), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()

    process = started(*settings, "cut", "--resume")  # the command of a trial is killed
    wait_for(lambda: commands(process), process)
    commands(process)[0].kill()
    code, output = ended(process)
    assert code == 0, output
    assert "ended by SIGKILL; goes on from its checkpoint" in output
    table = (folder / "whole" / "trials.csv").read_bytes()
    assert (folder / "cut" / "trials.csv").read_bytes() == table
    assert len(table.splitlines()) == trials + 1
    best = mtrain.load_spec(str(folder / "cut" / "best.yml")).spec
    assert best.optimizer.learning_rate == mtrain.open_sweep("cut").best.params["optimizer.learning_rate"]  # type: ignore[union-attr]
    assert best.report.name is None


STEPPED = {
    "optimizer.learning_rate": {"choices": [0.001, 0.01]},
    "optimizer.weight_decay": {"low": 0.0, "high": 0.1, "step": 0.1},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sampler", "begun"), [("grid", 1), ("random", 1), ("tpe", 10)]
)  # TPE learns after ten trials, CMA-ES of one number after four.
def test_a_killed_sweep_has_the_table_of_an_undisturbed_one_with_every_sampler(
    sampler: str, begun: int, folder: Path
) -> None:
    trials = begun + 1
    if sampler == "grid":
        (folder / "space.yml").write_text(yaml.safe_dump(STEPPED))
    settings = ["-c", "tiny.yml", "--space", "space.yml", "--sampler", sampler, "--out"]
    code, output = ended(started(*settings, "whole", "--trials", str(begun)))
    assert code == 0, output
    shutil.copytree(folder / "whole", folder / "cut")
    code, output = ended(started(*settings, "whole", "--trials", str(trials), "--resume"))
    assert code == 0, output
    records = folder / "cut" / "trials" / f"{begun:04d}" / "metrics.jsonl"
    process = started(*settings, "cut", "--trials", str(trials), "--resume")
    wait_for(records.exists, process)
    process.kill()  # while the last trial runs, which ends with it
    process.communicate()
    code, output = ended(started("--resume", "--out", "cut"))
    assert code == 0, output
    assert (folder / "cut" / "trials.csv").read_bytes() == (folder / "whole" / "trials.csv").read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--space", "none.yml"), "no such file, and no shipped space of that name"),
        ((), "nothing is searched"),
        (("--space", "tiny.yml"), "tiny.yml:"),
        (("--space", "space.yml", "--sampler", "grid"), "a grid needs `choices`, or `step`"),
        (("--space", "space.yml", "--metric", "AP:worst"), "expected NAME, NAME:max or NAME:min"),
        (("--space", "space.yml", "--out", "."), "is not an empty folder"),
        (("--space", "space.yml", "-o", "evaluate.every_updates=null"), "trials are judged by their evaluations"),
        (("--space", "space.yml", "-o", "data.root=/nowhere", "data.format=coco"), "error: "),
        (("--over", "backend=dpp"), "did you mean 'ddp'?"),
        (("--resume",), "there is no sweep in runs"),
        (("--resume", "--out", "nowhere"), "no such folder"),
        (("--space", "space.yml", "-H", "10.9.9.1,10.9.9.2"), "need a cluster that starts them"),
        (("--space", "space.yml", "-H", "10.9.9.1,10.9.9.2", "--cluster", "ssh"), "the first host is 10.9.9.1"),
        (("--show", "nowhere"), "no such folder"),
        (("--show", "."), "is not the folder of a sweep"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: tuple[str, ...], reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = () if words and words[0] in ("--resume", "--show") else ("-c", "tiny.yml")
    assert main(["sweep", *spec, *words]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert "Traceback" not in told
    assert sorted(path.name for path in folder.iterdir()) == ["space.yml", "tiny.yml"]


@pytest.mark.parametrize(("file", "content"), [("sweep.json", b"{}"), ("sweep.json", b"\xff\x00"), ("study.db", b"no database"),
                                               ("study.db", b"SQLite format 3\0" + bytes(5000))])  # fmt: skip
def test_a_damaged_folder_is_refused_in_one_sentence(
    file: str, content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.sweeping.jobs import sweep_request

    from mtrain_sweep import starting
    from mtrain_sweep.journal import Journal

    plan = starting.prepare(sweep_request(folder / "sweep"))
    Journal(plan.folder, direction="max").close()
    (folder / "sweep" / file).write_bytes(content)
    for words in (["--show", "sweep"], ["--resume", "--out", "sweep"]):
        assert main(["sweep", *words]) == 2
        *before, told = capsys.readouterr().err.splitlines()
        assert told.startswith("error: ")
        assert all(line.startswith("sweep folder: ") for line in before)
        assert file in told


def test_values_of_the_environment_do_not_replace_those_of_a_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain_sweep import trial_jobs

    environ = {"MTRAIN_OPTIMIZER__RATE": "9", "FLAGS_START_PORT": "7000", "MTRAIN_DEBUG": "1", "PATH": "/bin"}
    monkeypatch.setattr(trial_jobs.environment, "caller", lambda: environ)
    assert trial_jobs.caller_without_values() == {"MTRAIN_DEBUG": "1", "PATH": "/bin"}


@pytest.mark.slow
def test_a_sweep_over_backends_and_rank_counts_has_every_combination(folder: Path) -> None:
    result = mtrain.sweep(
        "tiny.yml", over={"backend": ["ddp", "deepspeed:stage=1"], "ranks": [1, 2]}, jobs=2, out="over"
    )
    assert (result.reason, len(result.trials)) == ("finished", 4)
    assert {(one.params["backend.name"], one.params["cluster.nproc_per_node"]) for one in result.trials} == {
        (backend, ranks) for backend in ("ddp", "deepspeed:stage=1") for ranks in (1, 2)
    }
    summaries = [mtrain.open_run(one.run_dir).summary for one in result.trials]
    assert [(summary["backend"], summary["ranks"]) for summary in summaries] == [
        ("ddp", 1), ("ddp", 2), ("deepspeed", 1), ("deepspeed", 2),
    ]  # fmt: skip
    assert {one.state for one in result.trials} == {"done"}
