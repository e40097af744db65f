"""The allocation of a scheduler is recognised by its variables; it never gets several jobs of one host in silence."""

import json
import tracemalloc
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.jobs.hosts.allocation import contradiction, readers, recognise
from mtrain_clusters.allocations.slurm import Slurm, expand_hosts

pytestmark = pytest.mark.smoke

FOLDER = Path(__file__).parents[1] / "data" / "allocations"
STARTED = {
    "slurm-srun-4-tasks": ("Slurm", 4, 2, 1, None),
    "slurm-srun-1-each": ("Slurm", 2, 2, 1, 1),
    "slurm-srun-1-each-pmi2": ("Slurm", 2, 2, 1, 1),
    "torchrun": ("torchrun", 2, None, 1, None),
    "horovodrun": ("horovodrun", 2, None, 1, None),
    "fleetrun": ("fleetrun", 2, None, 1, None),
    "openmpi": ("Open MPI", 8, None, 3, None),
    "openmpi-1-each": ("Open MPI", 2, 2, 1, 1),
    "mpich": ("MPI", 2, 2, 1, 1),
    "jsrun": ("jsrun", 4, None, 3, None),
    "kubeflow": ("Kubeflow", 2, 2, 1, 1),
    "kubeflow-elastic": ("Kubeflow", 4, 4, 0, 0),
    "kubeflow-v1-pet": ("Kubeflow", 3, 3, 2, 2),
    "kubeflow-v1": ("a starter of torch jobs", 2, None, 1, None),
    "sagemaker": ("SageMaker", 3, 3, 1, 1),
    "sagemaker-resource-config": ("SageMaker", 3, 3, 1, 1),
    "kubernetes-indexed-job": ("Kubernetes, as an indexed Job,", None, None, 0, 0),
}
"""(scheduler, processes, hosts, number of the process, place of its host) of each."""
GIVEN = {
    "slurm-sbatch-2-hosts": ("Slurm", 1, 2, None, None),
    "slurm-salloc-2-hosts": ("Slurm", 1, 2, None, None),
    "lsf": ("LSF", 1, 2, None, None),
    "pbs": ("PBS", 1, 2, None, None),
}
"""The command runs once, on the first of the hosts."""
ALONE = [
    "slurm-sbatch-1-host",
    "slurm-srun-1-task",
    "lsf-1-host",
    "pbs-1-host",
    "sagemaker-1-host",
    "kubeflow-1-node",
    "kubernetes-pod",
    "stale-shell",
]


def environ(name: str) -> dict[str, str]:
    """Return a recorded or documented environment; the first line of each file names its origin."""
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    if "PBS_NODEFILE" in variables:
        variables["PBS_NODEFILE"] = str(FOLDER / f"{name}.nodefile")
    return variables


@pytest.mark.parametrize("name", [*STARTED, *GIVEN])
def test_an_allocation_is_recognised_with_its_size_and_the_place_in_it(name):
    actual = recognise(environ(name))
    assert actual is not None
    expected = {**STARTED, **GIVEN}[name]
    assert (actual.scheduler, actual.processes, actual.hosts, actual.process, actual.place) == expected


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_alone_is_not_kept_from_training(name):
    assert recognise(environ(name)) is None


def test_every_environment_of_the_folder_is_used():
    assert {path.stem for path in FOLDER.glob("*.env")} == {*STARTED, *GIVEN, *ALONE}


def test_the_starter_closest_to_the_process_is_named():
    """torchrun in each task of a step; srun in the pod of an indexed Job."""
    assert recognise(environ("slurm-srun-4-tasks") | environ("torchrun")).scheduler == "torchrun"
    assert recognise(environ("kubernetes-indexed-job") | environ("openmpi")).scheduler == "Open MPI"


def test_the_order_is_the_declared_distance_and_none_is_declared_twice():
    distances = [reader.distance for reader in readers()]
    assert distances == sorted(set(distances))
    assert [type(reader).__name__ for reader in readers()][:2] == ["Torchrun", "Fleetrun"]


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("node[1-3,7],gpu01", "node1 node2 node3 node7 gpu01"),
        ("node[8-12]", "node8 node9 node10 node11 node12"),
        ("n[08-10,3]", "n08 n09 n10 n3"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("rack[1-2]n[1-2]-ib,login", "rack1n1-ib rack1n2-ib rack2n1-ib rack2n2-ib login"),
        ("node1", "node1"),
        ("alpha, host[5-6], gamma", "alpha host5 host6 gamma"),
        ("alpha beta  gamma", "alpha beta gamma"),
        ("1.2.3.[089, 100-101]", "1.2.3.089 1.2.3.100 1.2.3.101"),
        ("alpha , , beta", ""),
        ("a.b.c,d-[1]", "a.b.c d-1"),
        ("", ""),
        ("node[1-", ""),
        ("node[a-b]", ""),
        ("node1]", ""),
        ("n,,m", ""),
        ("node[1-99999999]", ""),
        ("n[1-65536]m[1-65536]", ""),
        ("n[1-100]m[1-100]", ""),
    ],
)
def test_slurms_short_form_of_hosts_is_expanded_without_scontrol(names, hosts):
    assert expand_hosts(names) == hosts.split()


def test_the_message_says_what_would_happen_and_what_to_type():
    assert contradiction(recognise(environ("slurm-srun-4-tasks"))) == (
        "this is process number 1 of 4 that Slurm starts (SLURM_JOB_ID=1, SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1), but no host "
        "is named with --ips: each of them would train a job of its own. For one job on all hosts, start mtrain once on each host "
        "(srun --ntasks-per-node=1 mtrain ...); mtrain itself starts the ranks of a host (--nproc-per-node). For a job of this "
        "process alone, add --nnodes 1"
    )
    assert contradiction(recognise(environ("lsf"))).startswith(
        "LSF has given this job 2 hosts (LSB_JOBID=4711, LSB_MCPU_HOSTS=hosta 4 hostb 4), but no host is named with --ips: it "
        "would train on this one alone. For one job on all hosts, add --cluster ssh --ips hosta,hostb, or start mtrain once on "
        "each host (blaunch -z HOSTS mtrain ...) with --ips hosta,hostb;"
    )
    assert "add --cluster ssh --ips n001.cluster,n002.cluster, or" in contradiction(recognise(environ("pbs")))
    assert "start mtrain once on each host with --ips A,B,..." in contradiction(recognise(environ("kubeflow-v1")))


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    "name", ["slurm-srun-4-tasks", "pbs", "torchrun", "kubernetes-indexed-job", "kubeflow-elastic"]
)
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


HOSTILE_ENVIRONMENTS = {
    "a billion pods": {"PET_NNODES": "999999999", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a-node-0-0.a"},
    "a billion pods of a PyTorchJob": {
        "PET_NNODES": "999999999",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "a-master-0",
    },
    "pods with a long name": {"PET_NNODES": "1000", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": f"a-0.{'b' * 120_000}"},
    "many ranges": {"SLURM_JOB_NODELIST": f"n[{','.join(['1-65536'] * 2000)}]"},
    "many brackets": {"SLURM_JOB_NODELIST": "[1-9]" * 6000},
    "many ranges in many brackets": {"SLURM_JOB_NODELIST": f"[{','.join(['1-9999'] * 50)}]" * 40},
    "a long name with a range": {"SLURM_JOB_NODELIST": f"{'n' * 100_000}[1-1000]"},
    "a range of long numbers": {"SLURM_JOB_NODELIST": f"n[{'0' * 100_000}1-1000]"},
    "numbers of many digits": {"SLURM_JOB_NODELIST": f"n[1-{'9' * 100_000}]"},
    "50,000 hosts": {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "h 1 " * 30_000},
}


@pytest.mark.job
@pytest.mark.parametrize("name", HOSTILE_ENVIRONMENTS)
def test_an_environment_of_any_size_is_refused_in_a_few_words_and_little_memory(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    variables = HOSTILE_ENVIRONMENTS[name]
    if "SLURM_JOB_NODELIST" in variables:
        variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", **variables}
    assert main(["train", "-c", "digits", "--backend", "solo", "-o", "train.epochs=x"]) == 2  # imports what it needs
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    capsys.readouterr()
    tracemalloc.start()
    try:
        code = main(["train", "-c", "digits", "--backend", "solo"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stderr = capsys.readouterr().err
    assert (code, "--ips" in stderr) == (2, True)
    assert len(stderr) < 3000
    assert peak < 100 << 20


def test_more_hosts_than_a_job_can_have_are_refused_with_their_number(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    values = {"SM_HOSTS": json.dumps([f"algo-{i}" for i in range(2000)]), "SM_CURRENT_HOST": "algo-1"}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    assert main(["train", "-c", "digits"]) == 2
    stderr = capsys.readouterr().err
    assert "2000 hosts" in stderr
    assert "1024" in stderr
    assert len(stderr) < 3000


@pytest.mark.parametrize(("nodes", "hosts"), [("1", None), ("2", 2), ("", None)])
def test_a_batch_script_of_slurm_on_one_node_is_a_job_of_this_host(nodes, hosts):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "n[1-2]"}
    found = Slurm(Slurm.Options()).read({name: value for name, value in environ.items() if value})
    assert (found and found.hosts) == hosts
