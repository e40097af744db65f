"""A scheduler that starts the command on every host, or several times, does not get as many jobs of one host in
silence."""

from pathlib import Path

import pytest

from mtrain.cli import main
from mtrain.cluster.allocation import contradiction, recognised

FOLDER = Path(__file__).parents[1] / "data" / "allocations"
STARTED = {
    "slurm-srun-4-tasks": ("Slurm", 4, 2, 1),
    "torchrun": ("torchrun", 2, None, 1),
    "horovodrun": ("horovodrun", 2, None, 1),
    "fleetrun": ("fleetrun", 2, None, 1),
    "openmpi": ("Open MPI", 8, None, 3),
    "mpich": ("MPI", 2, None, 1),
    "kubeflow": ("Kubeflow", 2, 2, 1),
    "kubeflow-v1": ("a starter of torch jobs", 2, None, 1),
    "kubernetes-indexed-job": ("Kubernetes, as an indexed Job,", None, None, 0),
}
"""(scheduler, processes, hosts, place) of each."""
GIVEN = {"slurm-sbatch-2-hosts": ("Slurm", 1, 2, None), "lsf": ("LSF", 1, 2, None)}
"""The command runs once, on the first of the hosts."""
ALONE = ["slurm-sbatch-1-host", "slurm-srun-1-task", "lsf-1-host", "kubernetes-pod", "stale-shell"]


def environ(name: str) -> dict[str, str]:
    """Return a recorded or documented environment; the first line of each file names its origin."""
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", [*STARTED, *GIVEN])
def test_an_allocation_is_recognised_with_its_size_and_the_place_in_it(name):
    actual = recognised(environ(name))
    assert actual is not None
    expected = {**STARTED, **GIVEN}[name]
    assert (actual.scheduler, actual.processes, actual.hosts, actual.place) == expected


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_alone_is_not_kept_from_training(name):
    assert recognised(environ(name)) is None


def test_every_environment_of_the_folder_is_used():
    assert {path.stem for path in FOLDER.glob("*.env")} == {*STARTED, *GIVEN, *ALONE}


def test_the_starter_closest_to_the_process_is_named():
    """torchrun in each task of a step; srun in the pod of an indexed Job."""
    assert recognised(environ("slurm-srun-4-tasks") | environ("torchrun")).scheduler == "torchrun"
    assert recognised(environ("kubernetes-indexed-job") | environ("openmpi")).scheduler == "Open MPI"


def test_the_message_says_what_would_happen_and_what_to_type():
    assert contradiction(recognised(environ("slurm-srun-4-tasks"))) == (
        "this is process number 1 of 4 that Slurm starts (SLURM_JOB_ID=1, SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1), but no host "
        "is named with --ips: each of them would train a job of its own. For one job on all hosts, start mtrain once on each host "
        '(srun --ntasks-per-node=1 mtrain ...) with --ips "$(scontrol show hostnames | paste -sd,)"; mtrain itself starts the '
        "ranks of a host (--nproc-per-node). For a job of this process alone, add --nnodes 1"
    )
    assert contradiction(recognised(environ("lsf"))).startswith(
        "LSF has given this job 2 hosts (LSB_JOBID=4711, LSB_MCPU_HOSTS=hosta 4 hostb 4), but no host is named with --ips: it "
        "would train on this one alone. For one job on all hosts, start mtrain once on each host (blaunch -z HOSTS mtrain ...) "
        "with --ips hosta,hostb;"
    )


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("name", ["slurm-srun-4-tasks", "slurm-sbatch-2-hosts", "torchrun", "kubernetes-indexed-job"])
def test_a_job_of_one_host_is_refused_in_an_allocation_of_several(command, name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for variable, value in environ(name).items():
        monkeypatch.setenv(variable, value)
    assert main([command, "-c", "digits", "--backend", "solo"]) == 2
    stderr = capsys.readouterr().err
    assert "no host is named with --ips" in stderr
    assert "add --nnodes 1" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--nnodes", "1"], ["--ips", "203.0.113.1,203.0.113.2"], ["--ips", "127.0.0.1"]])
def test_a_wish_for_one_host_and_hosts_that_are_named_are_obeyed(words, monkeypatch, capsys, tmp_path):
    """They go on to the next check: here the one for the data."""
    monkeypatch.chdir(tmp_path)
    for variable, value in environ("slurm-srun-4-tasks").items():
        monkeypatch.setenv(variable, value)
    assert main(["train", "-c", "yolov5n", "--backend", "ddp", "-o", "data.root=nowhere", *words]) == 2
    assert "no host is named" not in capsys.readouterr().err
