"""`mtrain run SCRIPT`: the same weights for every backend and number of ranks, exact resume, clear refusals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from mtrain.commands import main
from mtrain.core.checkpoint import store
from tests.ports import held_port
from tests.script.runs import QUIET, SCRIPTS, done, largest_difference, run, summary, weights
from tests.starts import starts_processes

TORCH, PADDLE = str(SCRIPTS / "train_torch.py"), str(SCRIPTS / "train_paddle.py")
STREAM = str(SCRIPTS / "train_stream.py")
FP64 = ("--precision", "fp64", "--dropout", "0")
BACKENDS = {
    "ddp-2": ("--backend", "ddp", "--nproc-per-node", "2"),
    "ddp-3": ("--backend", "ddp", "--nproc-per-node", "3"),
    "horovod-3": ("--backend", "horovod", "--nproc-per-node", "3"),
    "zero0-3": ("--backend", "deepspeed", "--nproc-per-node", "3", "-o", "backend.options.stage=0"),
    "zero1-3": ("--backend", "deepspeed", "--nproc-per-node", "3", "-o", "backend.options.stage=1"),
    "zero3-2": ("--backend", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
    "zero3-3": ("--backend", "deepspeed", "--nproc-per-node", "3", "-o", "backend.options.stage=3"),
}

SLOW = pytest.mark.slow
MORE = ("zero0-3", "zero1-3")
"""Stages that a quick run leaves out: other tests train with them."""


@pytest.fixture(scope="module")
@starts_processes
def one_rank(tmp_path_factory) -> Path:
    """A folder with the runs of one rank: `torch` and `paddle`, in float64 without dropout."""
    here = tmp_path_factory.mktemp("one_rank")
    done(here, "--name", "torch", "--backend", "solo", TORCH, *FP64)
    done(here, "--name", "paddle", "--backend", "solo", "-o", "backend.options.framework=paddle", PADDLE, *FP64)
    return here


@pytest.mark.parametrize("backend", [pytest.param(name, marks=SLOW if name in MORE else ()) for name in BACKENDS])
def test_every_backend_and_number_of_ranks_trains_a_script_to_the_same_weights(backend, one_rank, tmp_path):
    done(tmp_path, "--name", "many", *BACKENDS[backend], TORCH, *FP64)
    difference = largest_difference(weights(tmp_path, "many"), weights(one_rank, "torch"))
    print(f"{backend}: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12
    assert summary(tmp_path, "many")["best"]["accuracy"] == summary(one_rank, "torch")["best"]["accuracy"]


def test_the_weights_of_a_run_load_into_the_scripts_module_and_its_spec_names_no_other_model(
    one_rank, tmp_path, monkeypatch
):
    import torch

    monkeypatch.syspath_prepend(SCRIPTS)
    from train_torch import Net

    saved = store.load(store.best(one_rank / "runs/torch/checkpoints"))
    expected = {**saved.state.weights, **saved.state.ema}
    assert saved.state.ema, "the script averages its weights"
    assert main(["weights", "export", str(one_rank / "runs/torch"), "--to", str(tmp_path / "x.pt")]) == 0
    net = Net(0.0, branches=True).double()
    net.load_state_dict(torch.load(tmp_path / "x.pt"), strict=True)
    assert all(np.array_equal(tensor.numpy(), expected[name]) for name, tensor in net.state_dict().items())
    assert main(["weights", "export", str(one_rank / "runs/paddle"), "--to", str(tmp_path / "x.safetensors")]) == 0
    saved = store.load(store.best(one_rank / "runs/paddle/checkpoints"))
    arrays = load_file(tmp_path / "x.safetensors")
    assert largest_difference(arrays, {**saved.state.weights, **saved.state.ema}) == 0
    for file in ("spec.yml", "spec.json", "checkpoints/latest/state.json"):
        path = one_rank / "runs/torch" / file
        assert "yolov5n" not in (path.read_text() if path.exists() else ""), file


def test_fleet_trains_a_script_to_the_same_weights(one_rank, tmp_path):
    done(tmp_path, "--name", "many", "--backend", "fleet", "--nproc-per-node", "3", PADDLE, *FP64)
    difference = largest_difference(weights(tmp_path, "many"), weights(one_rank, "paddle"))
    print(f"fleet-3: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.job
@pytest.mark.parametrize(
    "backend", ["ddp-3", pytest.param("zero0-3", marks=SLOW), pytest.param("horovod-3", marks=SLOW)]
)
def test_an_optimizer_of_torch_trains_to_the_same_weights_on_many_ranks(backend, tmp_path):
    native = ("--no-branches", "--native", "NAdam")
    done(tmp_path, "--name", "one", "--backend", "solo", TORCH, *FP64, *native)
    done(tmp_path, "--name", backend, *BACKENDS[backend], TORCH, *FP64, *native)
    difference = largest_difference(weights(tmp_path, backend), weights(tmp_path, "one"))
    print(f"NAdam of torch, {backend}: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.job
def test_an_optimizer_of_paddle_trains_to_the_same_weights_on_many_ranks(tmp_path):
    solo = ("--backend", "solo", "-o", "backend.options.framework=paddle")
    done(tmp_path, "--name", "one", *solo, PADDLE, *FP64, "--native", "Adagrad")
    done(tmp_path, "--name", "two", "--backend", "fleet", "--nproc-per-node", "2", PADDLE, *FP64, "--native", "Adagrad")
    difference = largest_difference(weights(tmp_path, "two"), weights(tmp_path, "one"))
    print(f"Adagrad of Paddle, fleet-2: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.smoke
@pytest.mark.job
def test_accumulation_on_one_rank_is_two_ranks_bit_for_bit_with_dropout(tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", TORCH, "--no-branches", "--accumulate", "2")
    done(tmp_path, "--name", "two", "--nproc-per-node", "2", TORCH, "--no-branches", "--accumulate", "1")
    one, two = weights(tmp_path, "one"), weights(tmp_path, "two")
    assert one.pop("calls") == 2 * two.pop("calls")
    assert largest_difference(one, two) == 0


@pytest.mark.smoke
@pytest.mark.job
def test_a_killed_script_continues_to_the_same_bits(tmp_path):
    done(tmp_path, "--name", "whole", "--nproc-per-node", "2", TORCH)
    line = ["--name", "cut", "--nproc-per-node", "2", "-o", "checkpoint.every_updates=4", TORCH, "--delay", "0.1"]
    job = subprocess.Popen([sys.executable, "-m", "mtrain", "run", *line], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/cut/checkpoints/step-00000012/MANIFEST.json")
    rank = newest_rank(job.pid)
    os.kill(rank, signal.SIGKILL)
    assert job.wait(60) == 1
    result = done(tmp_path, "--resume", "runs/cut", "--nproc-per-node", "2", TORCH)
    assert "goes on from" in result.stdout
    whole, cut = summary(tmp_path, "whole"), summary(tmp_path, "cut")
    assert (cut["weights_sha256"], cut["ema_sha256"]) == (whole["weights_sha256"], whole["ema_sha256"])
    assert printed(tmp_path, "cut") == printed(tmp_path, "whole"), "the kept object was not restored"


WORKERS = """
import os, signal, sys
sys.path.insert(0, {scripts!r})
import numpy as np
import torch
import mtrain


class Own:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        {item}
        noise = torch.randn(8) + float(np.random.normal())
        return noise, index % 2


def main():
    with mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1))
        for inputs, targets in session.batches(Own(), global_batch=8, epochs=2, workers=int(sys.argv[1])):
            optimizer.update(torch.nn.functional.cross_entropy(model(inputs), targets))


{start}
"""
GUARD = 'if __name__ == "__main__":\n    main()'


def worker_script(folder: Path, *, item: str = "pass", start: str = GUARD) -> str:
    script = folder / "workers.py"
    script.write_text(WORKERS.format(scripts=str(SCRIPTS), item=item, start=start))
    return str(script)


@pytest.mark.job
def test_workers_read_the_same_samples_and_end_with_the_job(tmp_path):
    script = worker_script(tmp_path)
    for workers in ("0", "2"):
        done(tmp_path, "--name", workers, "--backend", "solo", script, workers)
    assert summary(tmp_path, "0")["weights_sha256"] == summary(tmp_path, "2")["weights_sha256"]


@pytest.mark.job
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"start": "main()"}, 'if __name__ == "__main__"'),
        ({"item": "index == 40 and os.kill(os.getpid(), signal.SIGKILL)"}, "a worker that reads samples has ended"),
        ({"item": "self.open = lambda: 0"}, "cannot be pickled"),
    ],
    ids=["no guard", "killed", "a lambda"],
)
def test_what_is_wrong_with_workers_is_one_sentence(settings, sentence, tmp_path):
    result = run(tmp_path, "--backend", "solo", worker_script(tmp_path, **settings), "1", timeout_s=120)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.job
def test_the_workers_of_a_killed_rank_end(tmp_path):
    script = worker_script(tmp_path, item="import time; time.sleep(0.05)")
    line = ["--name", "killed", "--backend", "solo", *QUIET, script, "2"]
    job = subprocess.Popen([sys.executable, "-m", "mtrain", "run", *line], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/killed/metrics.jsonl", holding='"kind": "update"')
    rank = psutil.Process(newest_rank(job.pid))
    below = rank.children(recursive=True)
    assert len(below) >= 3  # two workers and the server that has forked them
    rank.kill()
    assert job.wait(60) == 1
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive


@pytest.mark.smoke
@pytest.mark.job
def test_a_stream_trains_as_its_samples_by_number_do_on_any_number_of_ranks(tmp_path):
    done(tmp_path, "--name", "items", "--nproc-per-node", "2", STREAM, "--kind", "items")
    done(tmp_path, "--name", "whole", "--nproc-per-node", "2", STREAM)
    assert largest_difference(weights(tmp_path, "items"), weights(tmp_path, "whole")) == 0
    assert summary(tmp_path, "whole")["epochs"] == 3  # passes of 4 updates, of which the last has 3


@pytest.mark.job
def test_ranks_whose_parts_of_a_stream_end_apart_begin_the_next_pass_together(tmp_path):
    done(tmp_path, "--name", "parts", "--nproc-per-node", "2", STREAM, "--kind", "parts")
    assert summary(tmp_path, "parts")["epochs"] == 5  # rank 1 fills 3 updates of 12 samples, rank 0 would fill 4


@pytest.mark.job
@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.slow), "state"])
def test_a_killed_job_continues_its_stream_to_the_same_bits(kind, tmp_path):
    done(tmp_path, "--name", "uncut", "--nproc-per-node", "2", STREAM, "--kind", kind)
    line = ["--name", "cut", "--nproc-per-node", "2", *QUIET, "-o", "checkpoint.every_updates=2"]
    line += [STREAM, "--kind", kind, "--delay", "0.2"]
    job = subprocess.Popen([sys.executable, "-m", "mtrain", "run", *line], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/cut/checkpoints/step-00000006/MANIFEST.json")
    os.kill(newest_rank(job.pid), signal.SIGKILL)
    assert job.wait(60) == 1
    done(tmp_path, "--resume", "runs/cut", "--nproc-per-node", "2", STREAM, "--kind", kind)
    assert summary(tmp_path, "cut")["weights_sha256"] == summary(tmp_path, "uncut")["weights_sha256"]
    if kind == "state":
        log = (tmp_path / "runs/cut/metrics.jsonl").read_text()
        reads = int(log.rpartition("reads ")[2].split('"')[0])
        # 15 updates and one that is read ahead take 4 passes of 100 points; the first 6 updates were not read again.
        assert reads < 300


@pytest.mark.job
def test_a_script_that_is_asked_to_end_saves_first(tmp_path):
    line = ["--name", "asked", "--backend", "solo", TORCH, "--delay", "0.1"]
    job = subprocess.Popen([sys.executable, "-m", "mtrain", "run", *line], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/asked/metrics.jsonl", holding='"kind": "update"')
    job.terminate()
    assert job.wait(60) == 143
    at = summary(tmp_path, "asked")["updates"]
    assert 0 < at < 30
    assert (tmp_path / f"runs/asked/checkpoints/step-{at:08d}").is_dir()
    changed = tmp_path / "changed.py"
    changed.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport train_torch\ntrain_torch.main()\n")
    result = done(tmp_path, "--resume", "runs/asked", "--backend", "solo", str(changed))
    # Its text does not name mtrain, so what it prints has the one stream, and what mtrain says the other.
    assert "the script has changed" in result.stderr


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        ("session.log(**({'a': 1.0} if session.rank else {'b': 1.0}))", "log the same names on every rank"),
        ("if session.rank == 1 and session.progress.update == 2: break", "in the middle of update 2"),
        ("optimizer.update(loss)\n            if session.rank == 1: break\n            continue", "and others go on"),
    ],
    ids=["names", "in the middle", "one rank leaves"],
)
def test_ranks_that_go_different_ways_end_with_one_sentence(loop, sentence, tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(LOOP.format(scripts=str(SCRIPTS), body=loop))
    result = run(tmp_path, "--nproc-per-node", "2", str(script), timeout_s=60)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    # What rank 0 prints where another rank leaves it is shown among the lines; the verdict is last.
    assert "Traceback" not in result.stderr[result.stderr.rindex("error: ") :]


@pytest.mark.smoke
@pytest.mark.job
def test_an_error_in_the_script_shows_the_lines_of_the_script_alone(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(LOOP.format(scripts=str(SCRIPTS), body="raise ValueError('my own bug')"))
    result = run(tmp_path, "--nproc-per-node", "2", str(script))
    assert result.returncode == 1
    assert "my own bug" in result.stderr
    assert "broken.py" in result.stderr
    assert "runpy" not in result.stderr


@pytest.mark.smoke
@pytest.mark.job
def test_a_script_that_differs_from_the_planned_one_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import mtrain\n")
    plan = done(tmp_path, "--dry-run", "--backend", "solo", str(script)).stdout
    (tmp_path / "runs/x").mkdir(parents=True)
    done(tmp_path, "--name", "x", "--backend", "solo", str(script))
    digest = plan.split("--script-digest ")[1].split()[0]
    script.write_text("import mtrain  # changed\n")
    line = [sys.executable, "-m", "mtrain.rank.worker", "--run-dir", "runs/x-2", "--mode", "script"]
    ended = subprocess.run([*line, "--script-digest", digest, "--", str(script)], cwd=tmp_path, check=False, timeout=60)
    assert ended.returncode == 2
    assert "is not the one" in (tmp_path / "runs/x-2/logs/rank-0.log").read_text()


LOOP = """
import sys
sys.path.insert(0, {scripts!r})
import torch
from points import Points
import mtrain

if __name__ == "__main__":
    with mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1))
        for inputs, targets in session.batches(Points(64, 0), global_batch=8, epochs=1):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            {body}
            optimizer.update(loss)
"""


def wait_for(path: Path, *, holding: str = "", timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not (path.exists() and holding in path.read_text()):
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.05)


def newest_rank(starter: int) -> int:
    """Return the process number of a rank below ``starter``."""
    below = psutil.Process(starter).children(recursive=True)
    ranks = [
        process
        for process in below
        if "mtrain.rank.worker" in process.cmdline() and "--nnodes=1" not in process.cmdline()
    ]
    return ranks[-1].pid


def printed(here: Path, name: str) -> str:
    lines = (here / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line.partition('"message": ')[2] for line in lines if '"note"' in line and "accuracy" in line][-1]


@pytest.mark.job
def test_two_hosts_run_a_script_to_the_bits_of_two_ranks_on_one(tmp_path):
    first, second, one = (tmp_path / name for name in ("first", "second", "one"))
    for folder in (first, second, one):
        folder.mkdir()
    ports = ["--master-port", str(held_port()), "--control-port", str(held_port())]
    hosts = ["--name", "hosts", "--ips", "127.0.0.1,127.0.0.2", *ports]
    line = [sys.executable, "-m", "mtrain", "run", *QUIET, *hosts, "--node-rank", "1"]
    other = subprocess.Popen([*line, TORCH], cwd=second, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done(first, *hosts, "--node-rank", "0", TORCH)
    assert other.wait(60) == 0
    done(one, "--name", "one", "--nproc-per-node", "2", TORCH)
    assert summary(first, "hosts")["weights_sha256"] == summary(one, "one")["weights_sha256"]

    other = subprocess.Popen(
        [*line, TORCH, "--epochs", "1"], cwd=second, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    result = run(first, *hosts, "--node-rank", "0", TORCH, timeout_s=60)
    assert result.returncode == 2
    assert "script.arguments" in result.stderr
    assert other.wait(60) == 2
