"""Jobs in the queue of a real Slurm: what they learn, how they are asked to end, and how they go on."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import ENDLESS, UPDATES
from tests.cluster.lab import wait_for
from tests.cluster.slurm_lab import SlurmLab
from tests.cluster.test_lab_jobs import BACKENDS, SAME

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def updates(lab: SlurmLab, name: str) -> list[int]:
    """Numbers of the updates of a run that were made so far, one entry for each time."""
    path = lab.share / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["update"] for row in rows if row["kind"] == "update"]


def digests(lab: SlurmLab, name: str) -> dict[str, Any]:
    """Digests of the weights of a run that has ended well on three ranks."""
    summary = json.loads((lab.share / "runs" / name / "summary.json").read_text())
    assert (summary["updates"], summary["ranks"]) == (UPDATES, 3)
    return {key: summary[key] for key in SAME}


def output(lab: SlurmLab, number: str, name: str) -> str:
    """What a job has printed, for the message of a failed assertion."""
    path = lab.share / "runs" / ".submitted" / name / f"slurm-{number}.out"
    return path.read_text() if path.exists() else ""


def record(lab: SlurmLab, name: str) -> Path:
    return lab.share / "runs" / ".submitted" / name


def test_a_cancelled_job_saves_and_goes_on_to_the_bits_of_one_host(slurm: SlurmLab):
    """Three hosts with one rank each, ended and started again; and one host with three ranks."""
    one = slurm.submit("--name", "one", hosts=1, ranks=3)
    number = slurm.submit("--name", "three")
    wait_for(lambda: 2 in updates(slurm, "three"), what="update 2")
    slurm.run("node1", ["scancel", number])
    wait_for(lambda: "ended with exit code" in output(slurm, number, "three"), what="the end")
    printed = output(slurm, number, "three")
    assert "ended, state saved; go on with --resume" in printed
    assert printed.splitlines()[-1] == "mtrain ended with exit code 143"
    assert len(updates(slurm, "three")) < UPDATES
    assert slurm.wait(number, ENDED)["JobState"] == "CANCELLED"

    again = slurm.sbatch(str(record(slurm, "three") / "job.sbatch"))
    for name in ("three", again):  # known at once, by the run and by the id that sbatch has printed
        state = json.loads(slurm.mtrain("status", "--json", name))
        assert (state["id"], state["phase"] in ("waiting", "running")) == (again, True)
    assert slurm.wait(again, ENDED)["JobState"] == "COMPLETED", output(slurm, again, "three")
    assert updates(slurm, "three") == list(range(UPDATES))  # none was made twice
    lines = slurm.mtrain("logs", number).splitlines()
    ends = [line.rpartition(" ")[2] for line in lines if line.startswith("mtrain ended with exit code")]
    assert ends == ["143", "0"]
    assert slurm.wait(one, ENDED)["JobState"] == "COMPLETED", output(slurm, one, "one")
    assert digests(slurm, "three") == digests(slurm, "one")
    state = json.loads(slurm.mtrain("status", "--json", one))
    assert (state["phase"], state["code"], state["update"]) == ("done", 0, UPDATES)
    assert slurm.mtrain("logs", "-f", one).splitlines()[-1] == "mtrain ended with exit code 0"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_trains_on_three_hosts_as_on_one(slurm: SlurmLab, backend: str):
    names = {f"{backend}-1": {"hosts": 1, "ranks": 3}, f"{backend}-3": {"hosts": 3, "ranks": 1}}
    for name, placed in names.items():
        number = slurm.submit("--name", name, backend=backend, **placed)
        assert slurm.wait(number, ENDED, timeout_s=300)["JobState"] == "COMPLETED", output(slurm, number, name)
    assert digests(slurm, f"{backend}-1") == digests(slurm, f"{backend}-3")


@pytest.mark.slow
def test_a_running_job_is_shown_followed_and_cancelled(slurm: SlurmLab):
    number = slurm.submit("--name", "endless", "-o", f"train.updates={ENDLESS}", "-o", "checkpoint.every_updates=1000")
    wait_for(lambda: 2 in updates(slurm, "endless"), what="update 2")
    status = slurm.mtrain("status", number)
    assert f"job {number} (slurm), run endless: running on node1, node2, node3 [RUNNING" in status
    assert "asked to end" in slurm.mtrain("cancel", number)
    printed = slurm.mtrain("logs", "-f", number)
    assert "ended, state saved; go on with --resume" in printed
    assert printed.splitlines()[-1] == "mtrain ended with exit code 143"
    assert slurm.wait(number, ENDED)["JobState"] == "CANCELLED"
    state = json.loads(slurm.mtrain("status", "--json", number))
    assert (state["phase"], state["code"]) == ("cancelled", 143)
    assert "has ended already" in slurm.mtrain("cancel", number)


@pytest.mark.slow
def test_a_folder_with_blanks_and_signs_of_the_shell_trains(slurm: SlurmLab):
    folder = slurm.share / "a b %j $(touch stolen) 'x'"
    folder.mkdir()
    shutil.copy(slurm.share / "mtrain.yml", folder)
    words = ["submit", "--cluster", "slurm", "-b", "ddp", "-c", "mtrain.yml", "--name", "odd", "-o", "train.updates=2"]
    script = 'cd "$0" && exec "$@"'
    python = [sys.executable, "-m", "mtrain"]
    printed = slurm.run("node1", ["bash", "-c", script, str(folder), *python, *words])
    number = printed.split()[2]
    state = slurm.wait(number, ENDED)["JobState"]
    assert state == "COMPLETED", (folder / f"runs/.submitted/odd/slurm-{number}.out").read_text()
    assert (folder / "runs" / "odd" / "summary.json").exists()
    assert not list(slurm.share.rglob("stolen"))


@pytest.mark.slow
def test_a_host_that_is_not_in_the_job_is_named(slurm: SlurmLab):
    script = slurm.share / "wrong.sh"
    command = f"{sys.executable} -m mtrain train -b ddp --nproc-per-node 1 --cluster slurm --ips node1,node3"
    script.write_text(f"#!/bin/bash\n{command}\n")
    number = slurm.sbatch("-N2", "-w", "node1,node2", f"--output={slurm.share}/wrong.txt", str(script))
    slurm.wait(number, ENDED)
    printed = (slurm.share / "wrong.txt").read_text()
    assert "node3" in printed
    assert "cannot be reached by srun" in printed
    assert "scontrol show hostnames" in printed


@pytest.mark.slow
def test_two_hosts_that_were_off_for_a_moment_put_the_job_back_into_the_queue(slurm: SlurmLab):
    """Both are there again before anybody asks them, so that only mtrain knows that they were lost."""
    number = slurm.submit("--name", "off", "--requeue", "--time", "30", "--failure-timeout-s", "20")
    wait_for(lambda: 2 in updates(slurm, "off"), what="update 2")
    for node in ("node2", "node3"):
        slurm.power(node, "halt")
    slurm.up(3)
    wait_for(lambda: int(slurm.job(number)["Restarts"]) > 0, timeout_s=180, what="a start again")
    assert slurm.wait(number, ENDED, timeout_s=300)["JobState"] == "COMPLETED", output(slurm, number, "off")
    assert sorted(set(updates(slurm, "off"))) == list(range(UPDATES))


@pytest.mark.slow
def test_a_second_start_of_a_run_is_refused_with_the_job_that_runs(slurm: SlurmLab):
    more = ("-o", f"train.updates={ENDLESS}", "-o", "checkpoint.every_updates=1000")
    number = slurm.submit("--name", "twice", *more, hosts=1)
    wait_for(lambda: 2 in updates(slurm, "twice"), what="update 2")
    before = len(updates(slurm, "twice"))
    again = slurm.sbatch(str(record(slurm, "twice") / "job.sbatch"))
    assert slurm.wait(again, ENDED)["JobState"] == "FAILED"
    printed = output(slurm, again, "twice")
    assert "is running a job in this folder" in printed
    assert printed.splitlines()[-1] == "mtrain ended with exit code 2"
    state = json.loads(slurm.mtrain("status", "--json"))
    assert (state["id"], state["phase"]) == (number, "running")
    wait_for(lambda: len(updates(slurm, "twice")) > before + 2, what="further updates of the first start")
    slurm.mtrain("cancel", number)
    assert slurm.wait(number, ENDED)["JobState"] == "CANCELLED"
