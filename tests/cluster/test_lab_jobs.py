"""One command, or one on each host: three real hosts train what one host with three ranks trains."""

import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.jobs import HOSTS, UPDATES, Job, Jobs
from tests.cluster.lab import Lab

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(needed) is None, reason=f"{needed} is not installed"))
    for name, needed in {"ddp": "torch", "horovod": "horovod", "deepspeed": "deepspeed", "fleet": "paddle"}.items()
]
STARTS = ("over_ssh", "by_hand")
SAME = ("weights_sha256", "ema_sha256")


def cases(*more: Sequence[object]) -> list[object]:
    """Every combination with the first backend, the first one with each of the others: pytest parameters (backend, ...)."""
    combinations = list(itertools.product(*more))
    return [
        pytest.param(backend.values[0], *combination, marks=backend.marks)
        for place, backend in enumerate(BACKENDS)
        for combination in (combinations if place == 0 else combinations[:1])
    ]


def done(job: Job) -> dict[str, object]:
    """Summary of a job that has ended well on every host."""
    job.finish()
    assert [output.code for output in job.outputs] == [0] * len(job.outputs), job.leader.text
    summary = job.summary()
    assert (summary["updates"], summary["ranks"]) == (UPDATES, HOSTS)
    return {key: summary[key] for key in SAME}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_hosts_learn_bit_for_bit_what_one_host_with_three_ranks_learns(jobs: Jobs, backend: str):
    one = done(jobs.on_one(f"{backend}-one", backend=backend))
    assert done(jobs.over_ssh(f"{backend}-ssh", backend=backend)) == one
    assert done(jobs.by_hand(f"{backend}-hand", backend=backend)) == one


@pytest.fixture
def noisy(lab: Lab) -> Iterator[None]:
    """The login shell of one host prints what looks like a message, without a newline."""
    write = """printf '%s\\n' "printf '{\\"motd\\": 1}'" > ~/.bashrc"""
    lab.run("node2", ["sh", "-c", write])
    yield
    lab.run("node2", ["sh", "-c", "rm ~/.bashrc"])


@pytest.mark.parametrize(
    "backend",
    [BACKENDS[0], *(pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow]) for each in BACKENDS[1:])],
)
@pytest.mark.usefixtures("noisy")
def test_one_command_trains_on_three_hosts_and_writes_no_secret(jobs: Jobs, monkeypatch, backend: str):
    """Secrets of the caller, one of which all hosts are told."""
    planted = {"MY_DATABASE": "walrus-1", "HF_TOKEN": "walrus-2"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    job = jobs.over_ssh(
        f"{backend}-one-command",
        backend=backend,
        train__updates=2,
        evaluate__at_end="false",
        cluster__forward_env="[MY_DATABASE]",
    )
    output = job.finish()
    assert output.code == 0, output.text
    assert job.updates() == [0, 1]
    assert (job.folder / "logs" / "rank-2.log").exists()
    files = [path for path in job.folder.rglob("*") if path.is_file()]
    assert [path for path in files if b"walrus" in path.read_bytes()] == []


@pytest.fixture
def over_ipv6(lab: Lab) -> Iterator[str]:
    """Addresses of version 6 that the hosts have as well."""
    for number in range(1, HOSTS + 1):
        lab.run(f"node{number}", ["ip", "-6", "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"])
    yield ",".join(f"fd77::{number}" for number in range(1, HOSTS + 1))
    for number in range(1, HOSTS + 1):
        lab.run(f"node{number}", ["ip", "-6", "addr", "del", f"fd77::{number}/64", "dev", "eth0"])


@pytest.mark.slow
def test_hosts_with_addresses_of_ipv6_train_the_same(jobs: Jobs, over_ipv6: str):
    assert done(jobs.by_hand("ipv6", ips=over_ipv6)) == done(jobs.by_hand("ipv4"))


@pytest.mark.slow
def test_the_command_can_be_given_on_a_host_that_is_none_of_them(jobs: Jobs):
    assert done(jobs.over_ssh("elsewhere", at="node4"))["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_run_folders_need_not_be_shared(jobs: Jobs, lab: Lab, private: Path, start: str):
    job: Job = getattr(jobs, start)("private", runs=private)
    done(job)
    actual = {
        node: lab.run(node, ["find", str(job.folder), "-printf", "%P %m\n"]) for node in ("node1", "node2", "node3")
    }
    assert "checkpoints/step-00000010/MANIFEST.json" in actual["node1"]
    for rank, node in enumerate(("node1", "node2", "node3")):
        assert f"logs/rank-{rank}.log 600" in actual[node]
        assert "spec.json" in actual[node]
    assert "checkpoints/step" not in actual["node2"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_hosts_may_have_different_numbers_of_ranks(jobs: Jobs, backend: str):
    job = jobs.over_ssh("uneven", backend=backend, ips="10.77.0.1:1,10.77.0.2:2", ranks=None)
    assert done(job)["weights_sha256"]


@pytest.mark.slow
def test_a_shorter_form_of_the_same_hosts_gives_the_same_job(jobs: Jobs, lab: Lab):
    (lab.share / "hostfile").write_text("# three of them\nnode1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
    by_file = jobs.over_ssh("file", ips="", ranks=None, more=["--hostfile", str(lab.share / "hostfile")])
    typed = jobs.over_ssh("typed", ips="", ranks=None, more=["-H", "10.77.0.1:1,10.77.0.2:1,10.77.0.3:1"])
    assert done(by_file) == done(typed)


def test_the_plan_shows_the_command_of_each_host_and_how_it_gets_there(jobs: Jobs, lab: Lab):
    argv = jobs.argv("planned", backend="horovod")
    argv[argv.index("train")] = "plan"
    shown = lab.run("node1", [*argv, "--cluster", "ssh"])
    for node in range(HOSTS):
        assert f"--node-rank={node} --hosts=10.77.0.1:1,10.77.0.2:1,10.77.0.3:1" in shown
    for host in ("10.77.0.2", "10.77.0.3"):
        assert f" -- {host} 'exec " in shown
    typed = lab.run("node1", [*argv, "--cluster", "manual"])
    assert [f"--node-rank {node}" in typed for node in range(HOSTS)] == [True] * HOSTS
    assert lab.processes() == []
