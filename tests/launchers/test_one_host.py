"""Ranks are started without torchrun, and have what torchrun would give them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.backends._torch import forked
from mtrain.backends._torch.ranks import starter
from mtrain.core.interfaces import Host
from mtrain.launchers.torchrun import Torchrun
from mtrain.system import copied
from mtrain.system.rank_starter import read_deaths

COMMON = ["--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=29500"]
WORKER = ["-m", "mtrain.rank.worker", "--run-dir", "runs/x"]


def test_a_job_on_one_host_needs_no_torchrun():
    assert starter.alone(["--nnodes=1", *COMMON, "--max-restarts=0", "--log-dir=x", *WORKER])
    assert starter.alone(["--nnodes=1", *COMMON, "ranks.py", "--nnodes=7"])
    assert starter.alone(["--nnodes=1", *COMMON, *WORKER, "--mode", "script", "--", "train.py"])


def test_ranks_of_several_hosts_are_numbered_by_their_plan_and_not_by_torchrun():
    hosts = [Host(address=f"10.0.0.{slots}", slots=slots) for slots in (1, 2, 3)]
    launcher = Torchrun(Torchrun.Options(python=sys.executable, master_addr="10.0.0.1"))
    last = starter.alone(launcher.plan(WORKER, hosts, 1)[2].argv[3:])
    assert last is not None
    variables = starter._variables(1, last, has_store=False)
    assert (
        (variables["RANK"], variables["WORLD_SIZE"])
        == (variables["ROLE_RANK"], variables["ROLE_WORLD_SIZE"])
        == ("4", "6")
    )
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"]) == ("2", "3")
    script = launcher.plan([*WORKER, "--mode", "script", "--", "train.py"], hosts, 1)[2]
    assert starter.alone(script.argv[3:]) is None, "torchrun hosts the store until the scripts of all hosts have ended"


@pytest.mark.parametrize(
    "argv",
    [
        ["--nnodes=2", "--node-rank=0", *COMMON, *WORKER],
        ["--nnodes=1", *COMMON, "--max-restarts=1", *WORKER],
        ["--nnodes=1", *COMMON, "--rdzv-backend=c10d", *WORKER],
        ["--nnodes=1", "--nproc-per-node=gpu", *COMMON[1:], *WORKER],
        ["--nnodes=1", *COMMON],
    ],
    ids=["two hosts", "restarts", "another rendezvous", "ranks per device", "no command"],
)
def test_whatever_torchrun_alone_knows_is_left_to_it(argv):
    assert starter.alone(argv) is None


@pytest.mark.smoke
@pytest.mark.job
def test_starting_ranks_imports_no_framework():
    """Nor does an agent, or the preflight of a host, import what only the leader and the ranks need."""
    modules = "mtrain.backends._torch.ranks.starter, mtrain.jobs.hosts.agent, mtrain.jobs.preflight.facts"
    program = f"import sys, {modules}; print({{'torch', 'numpy', 'pydantic', 'stevedore'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


RANK = """
import json, os, random, signal, sys, time
import numpy

def main(words):
    if words == ["wait"]:
        asked = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        print("waiting", flush=True)
        while not asked:
            time.sleep(0.05)
        print("asked to end")
        return 0
    print("printed at once", end="")
    os.write(2, (json.dumps({
        "rank": os.environ["RANK"], "words": words, "argv": sys.argv[1:], "torch": "torch" in sys.modules,
        "parent": os.getppid(), "drawn": [random.random(), numpy.random.random()],
        "default": [signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler) for number in (2, 15)],
        "line": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    }) + chr(10)).encode())
    return int(words[0])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def started(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """Start two ranks whose program is ``RANK``, with its arguments."""
    (folder / "one_rank.py").write_text(RANK)
    command = [
        sys.executable,
        "-m",
        "mtrain.backends._torch.ranks.starter",
        "--nnodes=1",
        *COMMON,
        "-m",
        "one_rank",
        *words,
    ]
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.smoke
@pytest.mark.job
def test_ranks_are_copies_of_one_process_that_has_imported_torch(tmp_path):
    process = started(tmp_path, "0", "b c")
    output, errors = process.communicate(timeout=120)
    rows = sorted((json.loads(line) for line in errors.splitlines()), key=lambda row: row["rank"])
    assert (process.returncode, output) == (0, "printed at once" * 2)
    assert [row["rank"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["parent"] == process.pid
        assert row["torch"]
        assert row["words"] == row["argv"] == ["0", "b c"]
        assert row["line"] == [sys.executable, "-u", "-m", "one_rank", "0", "b c"]
        assert row["default"] == [True, True]
    assert rows[0]["drawn"][0] != rows[1]["drawn"][0]
    assert rows[0]["drawn"][1] != rows[1]["drawn"][1]


@pytest.mark.smoke
@pytest.mark.job
def test_ranks_that_fail_are_reported_with_their_exit_codes(tmp_path):
    process = started(tmp_path, "3")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert (0, 3) in read_deaths(errors) or (1, 3) in read_deaths(errors)


@pytest.mark.job
def test_a_request_to_end_reaches_ranks_that_are_copies(tmp_path):
    process = started(tmp_path, "wait")
    assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
    process.terminate()
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (0, "asked to end\n" * 2, "")


@pytest.mark.job
def test_ranks_of_a_starter_that_cannot_import_torch_are_processes_of_their_own(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such library: libtorch')")
    process = started(tmp_path, "0")
    _, errors = process.communicate(timeout=120)
    assert [json.loads(line)["torch"] for line in errors.splitlines()] == [False, False]
    assert process.returncode == 0


def test_where_a_gpu_is_visible_no_rank_is_a_copy(monkeypatch):
    monkeypatch.setattr(forked, "count_devices", lambda environ: 1)
    assert forked.program("mtrain.rank.worker", WORKER[2:]) is None


def test_where_the_kernel_forbids_it_to_show_a_command_line_no_rank_is_a_copy(monkeypatch):
    def refuse(line):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(copied, "_write_line", refuse)
    assert forked.program("mtrain.rank.worker", WORKER[2:]) is None


def variables(module: str) -> dict[str, dict[str, str]]:
    """Return the variables of each of two ranks that ``module`` starts, without those of this process."""
    before = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    command = [sys.executable, "-m", module, "--nnodes=1", *COMMON[:2], "--master-port=0", "-m", "timeit"]
    printing = "import os; os.write(1, (repr(dict(os.environ)) + chr(10)).encode())"
    result = subprocess.run(
        [*command, "-n1", "-r1", "-s", printing, "pass"],
        env={**before, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [eval(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {row["RANK"]: {name: value for name, value in row.items() if before.get(name) != value} for row in rows}


TORCHRUNS_OWN = {
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""Variables that differ: the port was drawn, rank 0 hosts the store instead of the starter, and the last two are messages
between torchrun and its own parts."""


@pytest.mark.slow
def test_a_rank_has_the_variables_that_torchrun_would_give_it():
    ours, theirs = variables("mtrain.backends._torch.ranks.starter"), variables("torch.distributed.run")
    assert ours.keys() == theirs.keys() == {"0", "1"}
    for rank in ours:
        different = {
            name for name in ours[rank].keys() | theirs[rank].keys() if ours[rank].get(name) != theirs[rank].get(name)
        }
        assert different <= TORCHRUNS_OWN, {name: (ours[rank].get(name), theirs[rank].get(name)) for name in different}
