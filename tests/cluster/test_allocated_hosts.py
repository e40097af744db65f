"""Hosts, own place and cluster come from the scheduler's allocation where nobody names hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mtrain
from mtrain.commands import main
from mtrain.errors import PluginError, UsageError
from mtrain.jobs.hosts.allocated_hosts import complete
from mtrain.spec import config
from tests.cluster.test_allocation import environ

pytestmark = pytest.mark.smoke

CLUSTER_PLUGIN = """
from mtrain.launchers.clusters.manual import Manual

class Batch(Manual):
    starts = True
"""
READER = """
from mtrain.core.interfaces.allocation import Allocation, AllocationReader

class Site(AllocationReader):
    distance = {distance}

    def read(self, environ):
        hosts = environ.get("SITE_HOSTS", "").split()
        if len(hosts) < 2:
            return None
        return Allocation(
            scheduler="our site", evidence="SITE_HOSTS", hosts=len(hosts), host_names=hosts, processes=len(hosts),
            processes_per_host=1, place=int(environ["SITE_PLACE"]),
        )
"""
NO_SCONTROL = {"PATH": "/nonexistent"}


@pytest.fixture
def batch_cluster(tmp_path, monkeypatch) -> None:
    """A cluster named slurm, in place of the shipped one."""
    (tmp_path / "batch_cluster.py").write_text(CLUSTER_PLUGIN)
    (tmp_path / "plugins.toml").write_text(
        '[clusters.slurm]\nmodule = "batch_cluster:Batch"\ndistribution = "plugins.toml"\n'
    )
    monkeypatch.chdir(tmp_path)


def loaded(**flags: object) -> config.Loaded:
    given = {path.replace("__", "."): config.Given(value, path) for path, value in flags.items()}
    return config.load({"_BASE_": "digits", "cluster": {"nproc_per_node": "auto"}}, flags=given, environ={})


def in_environment(name: str, **flags: object) -> config.Loaded:
    return complete(loaded(**flags), environ(name) | NO_SCONTROL)


@pytest.mark.job
def test_one_task_of_slurm_on_each_host_is_one_host_of_the_job():
    result = in_environment("slurm-srun-1-each")
    cluster = result.spec.cluster
    assert (cluster.ips, cluster.node_rank, cluster.name) == (["node1", "node2"], 1, "auto")
    assert cluster.nproc_per_node == "auto"
    assert str(result.origin("cluster.ips")) == "Slurm (SLURM_STEP_NODELIST=node[1-2])"
    assert str(result.origin("cluster.node_rank")) == "Slurm (SLURM_NODEID=1)"
    assert result.notes == (
        "hosts: node1, node2, from Slurm (SLURM_STEP_NODELIST=node[1-2]); this is host 1 (SLURM_NODEID=1)",
    )


@pytest.mark.job
def test_two_steps_that_share_a_host_meet_at_different_ports():
    ports = {
        complete(loaded(), environ("slurm-srun-1-each") | NO_SCONTROL | changed).spec.cluster.control_port
        for changed in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "3"})
    }
    assert len(ports) == 3
    assert all(10_000 <= int(port) < 20_000 for port in ports)
    assert in_environment("slurm-srun-1-each", cluster__control_port=4000).spec.cluster.control_port == 4000


@pytest.mark.job
@pytest.mark.usefixtures("batch_cluster")
def test_a_batch_script_leads_the_job_on_all_hosts_of_slurm():
    result = in_environment("slurm-sbatch-2-hosts")
    cluster = result.spec.cluster
    assert (cluster.ips, cluster.node_rank, cluster.name) == (["node1", "node2"], None, "slurm")
    assert cluster.nproc_per_node == "auto"  # one task for each host asks for hosts, not for one rank on each
    assert result.notes == ("hosts: node1, node2, from Slurm (SLURM_JOB_NODELIST=node[1-2])",)
    assert in_environment("slurm-sbatch-2-hosts", cluster__name="slurm").spec.cluster.ips == ["node1", "node2"]


@pytest.mark.job
@pytest.mark.usefixtures("batch_cluster")
def test_ranks_that_slurm_was_asked_for_are_those_of_the_job_unless_it_names_others():
    result = in_environment("slurm-salloc-2-hosts")
    assert (result.spec.cluster.name, result.spec.cluster.nproc_per_node) == ("slurm", 2)
    assert result.notes[0].endswith("; 2 ranks on each (SLURM_NTASKS_PER_NODE=2)")
    assert in_environment("slurm-salloc-2-hosts", cluster__nproc_per_node=3).spec.cluster.nproc_per_node == 3


@pytest.mark.job
def test_scontrol_lists_the_hosts_where_there_is_one(tmp_path):
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "a1\\na2\\n"\n')
    program.chmod(0o755)
    variables = environ("slurm-srun-1-each") | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert complete(loaded(), variables).spec.cluster.ips == ["a1", "a2"]
    program.write_text("#!/bin/sh\necho a1\n")
    with pytest.raises(UsageError, match=r"has given this job 2 hosts .* but names 1: a1"):
        complete(loaded(), variables)
    program.write_text("#!/bin/sh\nexit 1\n")
    assert complete(loaded(), variables).spec.cluster.ips == ["node1", "node2"]


@pytest.mark.parametrize(
    ("name", "hosts", "place", "port", "ranks", "interface"),
    [
        ("kubeflow", ["job-node-0-0.job", "job-node-0-1.job"], 1, 29400, "auto", None),
        ("kubeflow-v1-pet", ["job-master-0", "job-worker-0", "job-worker-1"], 2, 23456, 2, None),
        ("sagemaker", ["algo-1", "algo-2", "algo-3"], 1, "auto", "auto", "eth0"),
        ("sagemaker-resource-config", ["algo-1", "algo-2", "algo-3"], 1, "auto", "auto", "eth0"),
    ],
)
def test_containers_that_know_one_another_are_the_hosts_of_a_job(name, hosts, place, port, ranks, interface):
    cluster = in_environment(name).spec.cluster
    assert (cluster.ips, cluster.node_rank, cluster.name) == (hosts, place, "auto")
    assert (cluster.control_port, cluster.nproc_per_node, cluster.interface) == (port, ranks, interface)


def test_what_was_typed_stays():
    flags = {
        "cluster__node_rank": 0,
        "cluster__interface": "ib0",
        "cluster__control_port": 9,
        "cluster__nproc_per_node": 4,
    }
    for name in ("sagemaker", "kubeflow-v1-pet"):
        cluster = in_environment(name, **flags).spec.cluster
        assert (cluster.node_rank, cluster.interface, cluster.control_port, cluster.nproc_per_node) == (0, "ib0", 9, 4)


@pytest.mark.parametrize("first", ["job-node-0-1.job", "10.0.0.1", "master", "", "Job_0;x"])
def test_pods_whose_names_do_not_follow_from_the_first_are_a_contradiction(first):
    variables = environ("kubeflow") | {"PET_MASTER_ADDR": first}
    with pytest.raises(UsageError, match=r"process number 1 of 2 that Kubeflow starts .* no host is named"):
        complete(loaded(), variables)


def test_the_index_of_a_pod_is_its_place_among_hosts_that_are_named():
    hosts = {"cluster__ips": ["a", "b"]}
    variables = environ("kubernetes-indexed-job") | {"JOB_COMPLETION_INDEX": "1"}
    result = complete(loaded(**hosts), variables)
    assert result.spec.cluster.node_rank == 1
    assert str(result.origin("cluster.node_rank")) == "Kubernetes, as an indexed Job, (JOB_COMPLETION_INDEX=1)"
    assert complete(loaded(**hosts, cluster__node_rank=0), variables).spec.cluster.node_rank == 0
    # These know the hosts in an order of their own, or do not count hosts.
    for name in ("slurm-srun-1-each", "openmpi-1-each", "sagemaker", "lsf", "torchrun"):
        assert in_environment(name, **hosts).spec.cluster.node_rank is None, name


@pytest.mark.parametrize(
    "name", ["slurm-srun-4-tasks", "lsf", "pbs", "openmpi-1-each", "mpich", "torchrun", "fleetrun"]
)
def test_an_allocation_that_is_not_enough_is_a_contradiction(name):
    with pytest.raises(UsageError, match=r"no host is named with --ips.*add --nnodes 1"):
        in_environment(name)


@pytest.mark.job
@pytest.mark.parametrize("name", ["slurm-srun-4-tasks", "slurm-srun-1-each", "slurm-sbatch-2-hosts", "sagemaker"])
def test_one_host_means_this_process_alone_only_where_it_was_typed(name, tmp_path):
    alone = in_environment(name, cluster__nodes=1)
    assert (alone.spec.cluster.ips, alone.notes) == ([], ())
    (tmp_path / "spec.yml").write_text("_BASE_: digits\ncluster: {nodes: 1}\n")
    with pytest.raises(UsageError):
        complete(config.load(str(tmp_path / "spec.yml"), environ={}), environ(name) | NO_SCONTROL)


@pytest.mark.job
def test_another_number_of_hosts_than_the_scheduler_has_given_is_refused():
    with pytest.raises(UsageError, match=r"3 hosts wanted, but Slurm has given this job 2 .*; give 2, or name"):
        in_environment("slurm-srun-1-each", cluster__nodes=3)
    assert in_environment("slurm-srun-1-each", cluster__nodes=2).spec.cluster.ips == ["node1", "node2"]


def test_a_cluster_that_starts_hosts_is_not_started_on_each_of_them():
    with pytest.raises(UsageError, match=r"'ssh' brings a job to its hosts from one of them, but Slurm starts this"):
        in_environment("slurm-srun-1-each", cluster__name="ssh")


def test_a_cluster_that_chooses_hosts_itself_may_run_inside_an_allocation(tmp_path, monkeypatch):
    (tmp_path / "inner_cluster.py").write_text(
        f"{CLUSTER_PLUGIN}\n    def places(self, count):\n        return [f'place-{{n}}' for n in range(count)]\n"
    )
    (tmp_path / "plugins.toml").write_text('[clusters.inner]\nmodule = "inner_cluster:Batch"\n')
    monkeypatch.chdir(tmp_path)
    result = in_environment("slurm-sbatch-2-hosts", cluster__name="inner", cluster__nodes=3)
    assert (result.spec.cluster.name, result.spec.cluster.ips) == ("inner", [])
    with pytest.raises(UsageError, match="process number 1 of 4 that Slurm starts"):
        in_environment("slurm-srun-4-tasks", cluster__name="inner", cluster__nodes=3)


# ------------------------------------------------------------------------------------------------------- every command
@pytest.fixture
def second_task(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in environ("slurm-srun-1-each").items():
        monkeypatch.setenv(variable, value)


@pytest.mark.job
@pytest.mark.usefixtures("second_task")
def test_a_plan_and_the_explanation_of_a_value_show_the_hosts_of_the_scheduler(capsys):
    assert main(["plan", "-c", "digits", "-b", "ddp", "--json"]) == 0
    output = capsys.readouterr()
    assert [command["host"] for command in json.loads(output.out)["commands"]] == ["node1", "node2"]
    assert "hosts: node1, node2, from Slurm" in output.err
    assert main(["train", "-c", "digits", "-b", "ddp", "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "host 1: node2" in output.out
    assert "hosts: node1, node2, from Slurm" in output.err
    assert main(["config", "explain", "cluster.ips", "-c", "digits"]) == 0
    assert "from     Slurm (SLURM_STEP_NODELIST=node[1-2])" in capsys.readouterr().out
    assert main(["config", "show", "-c", "digits", "--origins"]) == 0
    assert "node_rank: 1  # Slurm (SLURM_NODEID=1)" in capsys.readouterr().out
    assert main(["train", "-c", "digits", "-b", "ddp", "--dry-run", "--nnodes", "1"]) == 0
    assert "node1" not in capsys.readouterr().out
    assert main(["train", "-c", "digits", "-b", "ddp", "--dry-run", "--nnodes", "3"]) == 2
    assert "--nnodes 3: 3 hosts wanted, but Slurm has given this job 2" in capsys.readouterr().err


def test_a_number_of_hosts_without_names_is_refused_outside_of_an_allocation(capsys):
    assert main(["plan", "-c", "digits", "-b", "ddp", "--nnodes", "2"]) == 2
    assert "--nnodes 2: no host is named; give --ips HOST,HOST" in capsys.readouterr().err


def test_a_spec_can_be_shown_in_an_allocation_that_is_not_enough(monkeypatch, capsys):
    for variable, value in environ("torchrun").items():
        monkeypatch.setenv(variable, value)
    assert main(["config", "show", "-c", "digits"]) == 0
    assert main(["plan", "-c", "digits"]) == 2
    assert main(["doctor", "--quick", "-c", "digits"]) == 2
    assert capsys.readouterr().err.count("no host is named with --ips") == 2


@pytest.mark.parametrize("function", [mtrain.train, mtrain.evaluate, mtrain.plan, mtrain.doctor])
def test_python_starts_no_job_of_one_host_in_an_allocation_of_several(function, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for variable, value in environ("openmpi").items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=r"process number 3 of 8 that Open MPI starts"):
        function("digits", backend="solo")
    assert list(tmp_path.iterdir()) == []


def test_python_takes_the_hosts_of_the_scheduler(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for variable, value in environ("sagemaker").items():
        monkeypatch.setenv(variable, value)
    plan = mtrain.plan("digits", backend="ddp", ranks=1, overrides={"train.batch_size": 12})
    assert [command.host for command in plan.commands] == ["algo-1", "algo-2", "algo-3"]
    alone = mtrain.plan("digits", backend="ddp", overrides={"cluster.nodes": 1})
    assert [command.host for command in alone.commands] == ["127.0.0.1"]


# --------------------------------------------------------------------------------------------------- plugins of others
@pytest.mark.job
def test_an_environment_of_somebody_else_is_recognised_and_nearer_ones_come_first(tmp_path):
    (tmp_path / "site_reader.py").write_text(READER.format(distance=35))
    (tmp_path / "plugins.toml").write_text('[allocations.site]\nmodule = "site_reader:Site"\nsummary = "ours"\n')
    site = {"SITE_HOSTS": "s1 s2 s3", "SITE_PLACE": "2"}

    def planned(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "mtrain", "plan", "-c", "digits", "-b", "ddp", "--batch-size", "12", "--json"]
        return subprocess.run(line, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)

    hosts = [command["host"] for command in json.loads(planned(site).stdout)["commands"]]
    assert hosts == ["s1", "s2", "s3"]
    hosts = [command["host"] for command in json.loads(planned(site | environ("sagemaker")).stdout)["commands"]]
    assert hosts == ["s1", "s2", "s3"]
    hosts = [command["host"] for command in json.loads(planned(site | environ("slurm-srun-1-each")).stdout)["commands"]]
    assert hosts == ["node1", "node2"]


def test_a_reader_that_is_broken_stops_a_job_and_says_how_to_do_without_it(tmp_path, monkeypatch):
    (tmp_path / "broken_reader.py").write_text("class Broken:\n    pass\n")
    policy = Path(tmp_path, "plugins.toml")
    policy.write_text('[allocations.broken]\nmodule = "broken_reader:Broken"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=r'write \[allocations\] disabled = \["broken"\] into plugins.toml'):
        complete(loaded(), {})
    policy.write_text('[allocations]\ndisabled = ["broken"]\n' + policy.read_text())
    assert complete(loaded(), {}).spec.cluster.ips == []
