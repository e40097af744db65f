"""Scripts of torch.distributed that know nothing of mtrain, started by ``mtrain run``."""

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys

import pytest
from tests.clusters.conftest import OUTSIDE
from tests.clusters.test_outside_cluster import HOSTS

from tests.ports import held_port
from tests.script.runs import run

pytestmark = pytest.mark.job

PLAIN = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(5):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(dist.get_rank() + step))).mean().backward()
    optimizer.step()
    if "fails" in sys.argv and dist.get_rank() == 1:
        raise ValueError("a bad number")
print("rank", dist.get_rank(), "of", dist.get_world_size(), model.module.bias.item())
dist.destroy_process_group()
"""


def said(here, name):
    """Return what the ranks have printed: (rank, ranks, bias)."""
    logs = sorted((here / "runs" / name / "logs").glob("rank-*.log"))
    return [re.search(r"rank (\d) of (\d) (\S+)", log.read_text()).groups() for log in logs]


@pytest.mark.smoke
def test_its_ranks_find_each_other_and_get_its_arguments(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    result = run(tmp_path, "--name", "two", "--backend", "ddp", "--nproc-per-node", "2", "plain.py", "--lr", "0.1")
    assert result.returncode == 0, result.stdout + result.stderr
    # gloo's thread once aborted every second such job at its end, when all was done.
    ranks = said(tmp_path, "two")
    # Rank 0's output is all that is on standard output; what mtrain says is on the other one.
    assert re.fullmatch(r"rank 0 of 2 \S+\n", result.stdout), result.stdout
    assert result.stderr.splitlines()[:2] == ["two: plain.py on ddp", "run folder: runs/two"]
    assert re.fullmatch(r"ended after .+ with exit code 0; logs: runs/two/logs", result.stderr.splitlines()[-1])
    assert "checkpoints" not in result.stdout + result.stderr
    assert [rank[:2] for rank in ranks] == [("0", "2"), ("1", "2")]
    assert ranks[0][2] == ranks[1][2]


def test_no_thread_waits_for_python_when_a_rank_ends(tmp_path):
    """A thread that waits for the interpreter gets it before Python ends; else gloo's thread would abort the process."""
    program = """
import ctypes, pathlib, sys, threading
from mtrain.rank import process
from mtrain.system.runfolder import RunFolder

sys.setswitchinterval(60)  # the main thread keeps the interpreter until it gives it away
ended = []

def work(stop, leave):
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    began.wait()

began = threading.Event()

def wait():
    began.set()
    ctypes.CDLL(None).usleep(1000)  # without the interpreter; it has to be taken again
    ended.append(1)

code = process.run(work, run_folder=RunFolder(pathlib.Path("runs/a")), environ={})
pathlib.Path("ended").write_text(str(len(ended)))
"""
    (tmp_path / "runs/a/logs").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "ended").read_text() == "1"


@pytest.mark.smoke
def test_the_first_rank_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    result = run(tmp_path, "--backend", "ddp", "--nproc-per-node", "2", "plain.py", "--lr", "0.1", "fails")
    assert result.returncode == 1
    assert re.search(r"rank 1 on \S+ failed first: ValueError: a bad number", result.stderr)
    assert "rank-1.log" in result.stderr


INTERRUPTED = """
import signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    for step in range(10000):
        dist.all_reduce(torch.ones(1))
        print(f"\\r{step}", end="", flush=True)
        time.sleep(0.05)
except KeyboardInterrupt:
    print(f"\\nrank {rank} saves")
    time.sleep(2.0 * rank)
    print(f"rank {rank} has saved")
    sys.exit(7)
"""
"""Rank 0 ends with an error while rank 1 is still saving."""


def test_ctrl_c_in_a_terminal_reaches_every_rank_which_may_end_in_its_own_way(tmp_path):
    (tmp_path / "plain.py").write_text(INTERRUPTED)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        line = ["-m", "mtrain", "run", "--all-ranks", "--backend", "ddp", "--nproc-per-node", "2", "plain.py"]
        os.execv(sys.executable, [sys.executable, *line])
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while True:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 1 << 16)
            elif b"^C" not in shown and has_begun(tmp_path):
                os.write(terminal, b"\x03")  # the terminal shows it as ^C
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = shown.decode().replace("\r\n", "\n")
    assert code == 130, text
    for rank in range(2):
        assert f"[{rank}] rank {rank} has saved\n" in text
    assert "SIGINT for the ranks ... (press Ctrl-C again to end at once)" in text
    assert "saving and ending" not in text
    assert re.search(r"ended after .+ with exit code 130; logs: runs/plain/logs\nended by SIGINT\n$", text), text


def has_begun(here):
    """Return whether both ranks train."""
    logs = [here / "runs/plain/logs" / f"rank-{rank}.log" for rank in range(2)]
    return all(log.exists() and b"\r1" in log.read_bytes() for log in logs)


def test_a_cluster_brings_it_to_two_hosts(tmp_path):
    here = tmp_path / "work"
    shutil.copytree(OUTSIDE, here, ignore=shutil.ignore_patterns("__pycache__"))
    (here / "plain.py").write_text(PLAIN)
    words = ("--name", "hosts", "--backend", "ddp", *HOSTS, "--master-port", str(held_port()))
    result = run(here, *words, "plain.py", "--lr", "0.1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(r"rank 0 of 2 \S+\n", result.stdout), "the first host has sent what rank 0 printed"
    assert [rank[:2] for rank in said(here, "hosts")] == [("0", "2"), ("1", "2")]
