"""A rank that is killed with -9 in any phase of a save: the job goes on from the last checkpoint to the undisturbed bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.core.checkpoint import store
from tests.faults.conftest import environment
from tests.own_model.runs import QUIET

pytestmark = pytest.mark.job

BACKENDS = {
    "ddp": ["ddp"],
    # Without the threshold, weights as small as these would stay whole on every rank.
    "zero": [
        "deepspeed", "-o", "backend.options.stage=3",
        "-o", "backend.options.config.zero_optimization.stage3_param_persistence_threshold=0",
    ],
    "fsdp": ["fsdp"],
}  # fmt: skip
WRITING = [
    "0 0 a file's header",
    "0 0 an array",
    "0 1 an array",
    "0 1 flushing a file",
    "0 0 the manifest's digest",
    "0 4 flushing a file",
    "0 0 renaming",
    "0 1 flushing the folder",
]
"""Deaths of the rank that writes: the rank, the number of calls before, the phase. The last one comes after the renaming."""
GATHERING = ["1 0 gathering", "0 0 gathering"]
COPYING = ["0 0 copying", "1 0 copying"]
SPEC = """
model: {name: ./saving.py:Net}
data: {format: ./saving.py:data}
evaluate: {enabled: false}
train: {updates: 8, batch_size: 8, ema: {decay: 0.9}}
optimizer: {rule: adamw, learning_rate: 0.01}
checkpoint: {every_updates: 3, keep_last: 9}
"""


def _train(here: Path, name: str, *words: str, deaths: list[str] | None = None) -> tuple[dict, str]:
    """Train on two ranks; return the run's summary, and what was printed."""
    (here / "saving.py").write_text((Path(__file__).parent / "saving.py").read_text())
    (here / "saving.yml").write_text(SPEC)
    folder = here / f"{name}-deaths"
    folder.mkdir()
    for number, death in enumerate(deaths or []):
        (folder / f"{number:02d}").write_text(death)
    argv = ["train", "-c", "saving.yml", "--name", name, "--nproc-per-node", "2", "--devices", "cpu", *QUIET, *words]
    argv += ["--max-restarts", str(len(deaths or []))]
    job = subprocess.run(
        [sys.executable, "-m", "mtrain", *argv],
        cwd=here,
        env={**environment(), "DEATHS": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert list(folder.iterdir()) == [], f"deaths that did not come\n{job.stdout}{job.stderr}"
    return json.loads((here / "runs" / name / "summary.json").read_text()), job.stdout + job.stderr


def _check(here: Path, backend: str, *, asynchronous: bool, deaths: list[str]) -> None:
    words = ["--backend", *BACKENDS[backend], "-o", f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    whole, _ = _train(here, "whole", *words)
    cut, shown = _train(here, "cut", *words, deaths=deaths)
    assert cut["updates"] == whole["updates"] == 8
    for digest in ("weights_sha256", "ema_sha256"):
        assert cut[digest] == whole[digest], shown
    folders = store.list_all(here / "runs/cut/checkpoints")
    assert [store.verify(folder) for folder in folders] == [[]] * len(folders)
    assert [int(folder.name[-8:]) for folder in folders] == [3, 6, 8]
    assert not list((here / "runs/cut/checkpoints").glob(".tmp-*")), "what dead writers left is gone"


def test_a_job_goes_on_from_kills_in_a_save_of_parts_in_the_background(tmp_path: Path) -> None:
    _check(tmp_path, "fsdp", asynchronous=True, deaths=[GATHERING[0], WRITING[2]])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a job that starts up to twelve times
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_job_goes_on_from_a_kill_in_each_phase_of_a_save(tmp_path: Path, backend: str, asynchronous: bool) -> None:
    gathering = [] if backend == "ddp" else GATHERING
    copying = COPYING if asynchronous else []
    if backend == "ddp":  # what rank 0 saves needs nothing of rank 1, whose death ends no save
        copying = copying[:1]
    _check(tmp_path, backend, asynchronous=asynchronous, deaths=[*copying, *gathering, *WRITING])
