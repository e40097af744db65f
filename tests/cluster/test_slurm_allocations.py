"""A job takes its hosts from a real Slurm, in a batch script and in steps, without a list of hosts."""

import sys

import pytest

from tests.cluster.jobs import UPDATES
from tests.cluster.slurm_lab import SlurmLab
from tests.cluster.test_slurm_jobs import ENDED, digests, updates

MTRAIN = f"{sys.executable} -m mtrain"


@pytest.mark.slow
def test_a_batch_script_and_a_step_take_the_hosts_of_slurm_and_train_to_the_same_bits(slurm: SlurmLab):
    train = "train --backend ddp --nproc-per-node 1 --name"
    script = slurm.sbatch("-N", "3", "--output", "batch.txt", "--wrap", f"{MTRAIN} {train} batch")
    assert slurm.wait(script, ENDED)["JobState"] == "COMPLETED", (slurm.share / "batch.txt").read_text()
    printed = (slurm.share / "batch.txt").read_text()
    assert "hosts: node1, node2, node3, from Slurm (SLURM_JOB_NODELIST=node[1-3])" in printed
    srun = f"srun --ntasks-per-node=1 {MTRAIN} {train} step"
    step = slurm.sbatch("-N", "3", "--output", "step.txt", "--wrap", srun)
    assert slurm.wait(step, ENDED)["JobState"] == "COMPLETED", (slurm.share / "step.txt").read_text()
    printed = (slurm.share / "step.txt").read_text()
    assert "from Slurm (SLURM_STEP_NODELIST=node[1-3]); this is host 0 (SLURM_NODEID=0)" in printed
    assert updates(slurm, "batch") == updates(slurm, "step") == list(range(UPDATES))
    assert digests(slurm, "batch") == digests(slurm, "step")


@pytest.mark.slow
def test_what_slurm_starts_several_times_on_a_host_is_refused_by_each_task(slurm: SlurmLab):
    srun = f"srun --ntasks=4 --nodes=2 {MTRAIN} train --backend ddp"
    number = slurm.sbatch("-N", "2", "--ntasks-per-node", "2", "--output", "tasks.txt", "--wrap", srun)
    assert slurm.wait(number, ENDED)["ExitCode"] == "2:0"
    printed = (slurm.share / "tasks.txt").read_text()
    assert printed.count("start mtrain once on each host (srun --ntasks-per-node=1 mtrain ...)") == 4
    assert "process number 3 of 4 that Slurm starts" in printed
