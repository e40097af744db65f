"""The cluster ``ray`` without Ray: plans, options, the environment of agents, and what is said where Ray is missing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mtrain.errors import SpecError, UsageError
from mtrain.jobs.hosts import many_hosts
from mtrain.jobs.plan import means, plan
from mtrain.jobs.plan.machine import Machine
from mtrain.spec import config
from mtrain_clusters._ray.bridge import Bridge
from mtrain_clusters._ray.placement import library
from mtrain_clusters.submission import queue_of

FLAGS = ("-c", "digits", "-b", "ddp", "--cluster", "ray", "--nproc-per-node", "1", "-o", "train.batch_size=12")


def _mtrain(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtrain", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def _loaded(**values: object) -> config.Loaded:
    flags = {key.replace("__", "."): value for key, value in values.items()}
    return config.load("digits", flags={"cluster.name": "ray", "cluster.nproc_per_node": 1, **flags}, environ={})


@pytest.mark.job
def test_a_plan_names_hosts_that_ray_will_choose_and_needs_no_ray(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text("raise AssertionError('a plan imports Ray')")
    process = _mtrain("plan", *FLAGS, "--nnodes", "3", "--json", PYTHONPATH=str(tmp_path))
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert [command["host"] for command in found["commands"]] == ["ray-0", "ray-1", "ray-2"]
    assert found["numbers"]["ranks"] == "3 (3 hosts x 1)"


def test_the_spec_of_a_job_on_hosts_that_ray_chooses_keeps_no_names():
    loaded = _loaded(cluster__nodes=2)
    assert means.host_names(loaded.job) == ["ray-0", "ray-1"]
    assert loaded.spec.cluster.ips == []


def test_a_cluster_that_chooses_no_hosts_still_wants_their_names():
    with pytest.raises(SpecError, match="no host is named; give them with --ips"):
        means.host_names(_loaded(cluster__name="ssh", cluster__nodes=2).job)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gpu": 1}, "did you mean 'gpus'"), ({"cpus": -1}, "cpus"), ({"resources": {"TPU": 0}}, "TPU")],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        means.host_names(_loaded(cluster__options=options).job)


def test_submit_names_the_command_of_ray():
    with pytest.raises(
        UsageError, match=r"'ray' given, which has no queue; .*; submit it with `ray job submit -- mtrain"
    ):
        queue_of(_loaded(cluster__nodes=2))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"Ray is not installed here .*\[ray\]"):
        library()


def test_devices_of_the_leader_are_not_those_of_the_hosts():
    loaded = _loaded(cluster__nodes=2, train__batch_size=12)
    draft = plan.make_plan(
        loaded, run_dir=Path("runs/x"), resume=None, machine=Machine(cores=2, devices=0, python="python")
    )
    environ = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"}
    assert many_hosts._forward(draft, environ, ()) == {"NCCL_DEBUG": "INFO"}
    assert many_hosts._forward(draft, environ, ["CUDA_VISIBLE_DEVICES"]) == {"NCCL_DEBUG": "INFO"}


# --------------------------------------------------------------------------------------------------------------- bridge
@pytest.fixture
def bridge() -> Iterator[Callable[[str], Bridge]]:
    bridges: list[Bridge] = []

    def make(code: str) -> Bridge:
        bridges.append(Bridge([sys.executable, "-c", code], {}))
        return bridges[-1]

    yield make
    for made in bridges:
        made.kill()
        made._reader.join()
        with made._process:
            made.close()


def _received(bridge: Bridge) -> bytes:
    parts = b""
    while (part := bridge.receive(10.0)) is not None:
        parts += part
    return parts


@pytest.mark.job
def test_the_agent_has_the_variables_of_its_node_without_those_of_rays_workers(monkeypatch, bridge):
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    names = json.loads(_received(bridge("import os, json; print(json.dumps(dict(os.environ)))")))
    assert names["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"RAY_JOB_ID", "OMP_NUM_THREADS", "PYTHONBREAKPOINT"} & names.keys()


@pytest.mark.job
def test_bytes_pass_both_ways_until_one_end_closes(bridge):
    agent = bridge("import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[::-1])")
    agent.send(b"abc" * 50_000)
    agent.close()
    assert _received(agent) == b"cba" * 50_000
    assert agent.words(10.0) == (0, [])
    agent.send(b"more")  # is lost: the agent has ended


@pytest.mark.job
def test_the_status_and_the_last_lines_of_an_agent_are_known(bridge):
    agent = bridge("import sys; print('mtrain-agent-status x', file=sys.stderr); sys.exit(7)")
    assert _received(agent) == b""
    assert agent.words(10.0) == (7, ["mtrain-agent-status x"])


@pytest.mark.job
def test_the_agent_is_no_child_of_the_actor_and_ends_when_the_actor_is_killed(tmp_path):
    """Ray kills the children of a worker, and an agent that is killed cannot end its ranks."""
    tell = f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); sys.stdin.read()"
    code = f"""
import sys, time
from mtrain_clusters._ray.bridge import Bridge
bridge = Bridge([sys.executable, "-c", {tell!r}], {{}})
time.sleep(60)
"""
    actor = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    agent = psutil.Process(int((tmp_path / "pid").read_text()))
    assert agent.pid not in [child.pid for child in psutil.Process(actor.pid).children(recursive=True)]
    actor.kill()
    actor.wait()
    agent.wait(10)


@pytest.mark.job
def test_an_agent_that_hangs_is_killed(bridge):
    agent = bridge("import time; time.sleep(60)")
    agent.kill()
    assert _received(agent) == b""
