"""Environments that schedulers, shells or other people may leave: a plan follows from them, or one error says why not."""

import os
import sys
from pathlib import Path

import pytest

from mtrain.commands import main

pytestmark = [pytest.mark.job, pytest.mark.smoke]

HUGE = "9" * 400
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
ENVIRONMENTS = {
    "slurm, no list": SLURM,
    "slurm, huge range": SLURM | {"SLURM_JOB_NODELIST": "n[0-99999999]"},
    "slurm, many ranges": SLURM | {"SLURM_JOB_NODELIST": ",".join(f"n[{i}-{i + 9}]" for i in range(20_000))},
    "slurm, nested brackets": SLURM | {"SLURM_JOB_NODELIST": "n" + "[" * 5000},
    "slurm, product of ranges": SLURM | {"SLURM_JOB_NODELIST": "n[0-999]m[0-999]k[0-999]"},
    "slurm, a command": SLURM | {"SLURM_JOB_NODELIST": "n1;touch owned,$(touch owned)"},
    "slurm, an option": SLURM | {"SLURM_JOB_NODELIST": "--help"},
    "slurm, negative": SLURM | {"SLURM_JOB_NUM_NODES": "-1", "SLURM_NTASKS": "-2"},
    "slurm, digits of another script": SLURM | {"SLURM_NTASKS": "²", "SLURM_JOB_NUM_NODES": "٣"},
    "slurm, no numbers": SLURM | {"SLURM_NTASKS": "x", "SLURM_PROCID": "", "SLURM_JOB_NUM_NODES": HUGE},
    "slurm, a job that is a path": SLURM | {"SLURM_JOB_ID": "../../x", "SLURM_ARRAY_TASK_ID": "/etc"},
    "slurm, bytes": SLURM | {"SLURM_JOB_NODELIST": "n\udcff1,n2"},
    "torchrun, huge": TORCHRUN | {"PET_NNODES": "999999999", "WORLD_SIZE": HUGE},
    "torchrun, a range": TORCHRUN | {"PET_NNODES": "1:999999999", "PET_NPROC_PER_NODE": "gpu"},
    "torchrun, no numbers": TORCHRUN | {"RANK": "first", "WORLD_SIZE": "all", "LOCAL_RANK": "-1"},
    "torchrun, a rank beyond the world": TORCHRUN | {"RANK": "7"},
    "variables of torch alone": {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "-oProxyCommand=id",
        "MASTER_PORT": "x",
    },
    "open mpi, huge": MPI | {"OMPI_COMM_WORLD_SIZE": HUGE},
    "open mpi, zero": MPI | {"OMPI_COMM_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
    "pmi": {"PMI_RANK": "1", "PMI_SIZE": HUGE, "PMI_FD": "-1"},
    "pbs, a pipe": {"PBS_JOBID": "1", "PBS_NODEFILE": "{pipe}"},
    "pbs, a device": {"PBS_JOBID": "1", "PBS_NODEFILE": "/dev/zero"},
    "pbs, a folder": {"PBS_JOBID": "1", "PBS_NODEFILE": "/"},
    "pbs, a large file": {"PBS_JOBID": "1", "PBS_NODEFILE": "{large}"},
    "lsf": {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "n1 " + HUGE + " n2 -4", "LSB_DJOB_HOSTFILE": "{pipe}"},
    "kubeflow": {"TF_CONFIG": "[" * 100_000, "KUBERNETES_SERVICE_HOST": "x", "MPI_HOST_FILE": "{pipe}"},
    "indexed job": {"JOB_COMPLETION_INDEX": HUGE, "KUBERNETES_SERVICE_HOST": "::1", "HOSTNAME": "a-" + HUGE},
    "sagemaker": {"SM_HOSTS": "[" * 100_000, "SM_CURRENT_HOST": "algo-1"},
    "sagemaker, kinds": {"SM_HOSTS": '{"a": 1}', "SM_CURRENT_HOST": "[]"},
    "fleetrun": {"PADDLE_TRAINERS_NUM": HUGE, "PADDLE_TRAINER_ID": "x", "PADDLE_TRAINER_ENDPOINTS": "a:b:c,,:"},
    "horovodrun": {"HOROVOD_SIZE": HUGE, "HOROVOD_RANK": "-1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "x"},
    "own variables": {"MTRAIN_TRAIN__SEED": "[" * 100_000, "MTRAIN_TRAIN__EPOCHS": HUGE},
    "own variables, bytes": {"MTRAIN_REPORT__NAME": "a\udcff", "MTRAIN_DATA__ROOT": "\udcff"},
    "own variables that are none": {"MTRAIN_": "1", "MTRAIN___": "1", "MTRAIN_TRAIN": "1", "MTRAIN_X__Y": "1"},
    "no home, no path": {
        "HOME": "/nonexistent",
        "PATH": "",
        "LANG": "xx_XX.nothing",
        "LC_ALL": "xx",
        "TERM": "nothing",
    },
    "a terminal of no size": {"COLUMNS": "-5", "LINES": HUGE, "TERM": "xterm"},
    "devices": {"CUDA_VISIBLE_DEVICES": "GPU-\udcff,-1,99999999999999999999," + "0," * 50_000},
    "threads": {"OMP_NUM_THREADS": "-3", "MKL_NUM_THREADS": "many"},
    "no temporary folder": {"TMPDIR": "/nonexistent"},
}

REFUSED = (
    "slurm, no list", "slurm, huge", "slurm, many", "slurm, nested", "slurm, product", "slurm, a", "slurm, bytes", "torchrun, huge",
    "torchrun, a", "variables of torch", "lsf", "own variables",
)  # fmt: skip
"""Beginnings of the names of environments that ask for what cannot be done; from the others a plan for this host follows."""
MADE = {"{pipe}": os.mkfifo, "{large}": lambda path: path.write_text("host\n" * 2_000_000)}
"""Value of a variable that stands for a file -> what makes the file."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_of_others_is_understood_or_refused_in_words(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for variable in [
        variable for variable in os.environ if variable.startswith(("SLURM_", "PET_", "OMPI_", "MTRAIN_"))
    ]:
        monkeypatch.delenv(variable)
    made = set()
    for variable, value in ENVIRONMENTS[name].items():
        if value in MADE:
            made.add(value)
            MADE[value](tmp_path / value)
            value = str(tmp_path / value)
        monkeypatch.setenv(variable, value)
    code = main(["plan", "-c", "digits", "-b", "ddp", "--nproc-per-node", "2"])
    printed = capfd.readouterr()
    assert code == (2 if name.startswith(REFUSED) else 0), printed.err
    assert code == 0 or printed.err, "refused without a word"
    assert "recognises allocations, failed" not in printed.err  # a reader that breaks ends with 2 as well
    assert "Traceback" not in printed.err
    assert len(printed.err) < 4000, len(printed.err)
    assert not any("\udc80" <= letter <= "\udcff" for letter in printed.err + printed.out)
    assert {entry.name for entry in Path().iterdir()} == made, "a plan writes nothing"
    assert sys.getrecursionlimit() == 1000
