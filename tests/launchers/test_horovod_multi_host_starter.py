"""The ranks of one host of a Horovod job on several hosts; here all "hosts" are addresses of this machine's loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mtrain.system.rank_starter import read_deaths
from tests.ports import held_port

pytestmark = pytest.mark.horovod

HOSTS = "--hosts=127.0.0.1:1,127.0.0.2:2"
ME = "import os, sys, time, signal, subprocess; rank = os.environ['HOROVOD_RANK']\n"


class Hosts:
    """Starts commands of hosts in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = held_port()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, node: int, script: str, *, hosts: str = HOSTS, interface: str = "lo") -> "subprocess.Popen[str]":
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "GLOO_"))}
        env |= {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mtrain.backends._horovod.multi_host_starter", f"--node-rank={node}", hosts),
                *(f"--rendezvous=127.0.0.1:{self.port}", "--", sys.executable, "-c", ME + textwrap.dedent(script)),
            ],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def wait(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, "waited too long"
            time.sleep(0.02)

    def wait_for_file(self, name: str) -> str:
        self.wait(lambda: (self.folder / name).exists() and (self.folder / name).read_text())
        return (self.folder / name).read_text()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    below = [child for process in made.started if process.poll() is None for child in family(process)]
    for process in [*made.started, *below]:
        process.kill()
    for process in made.started:
        process.communicate()


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.job
def test_the_commands_of_two_hosts_make_one_job_whichever_is_started_first(hosts: Hosts):
    script = """
        import horovod.torch as hvd, json, torch
        hvd.init()
        total = hvd.allreduce(torch.ones(2) * (hvd.rank() + 1), op=hvd.Sum).tolist()
        found = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total]
        open(f"rank-{rank}", "w").write(json.dumps(found))
    """
    second = hosts.start(1, script)
    hosts.wait(lambda: signal.SIGTERM in caught(second))
    first = hosts.start(0, script)
    assert (first.communicate(timeout=240)[0], first.returncode) == ("", 0)
    assert (second.communicate(timeout=240)[0], second.returncode) == ("", 0)
    assert [json.loads((hosts.folder / f"rank-{rank}").read_text()) for rank in range(3)] == [
        [0, 3, 0, 1, 0, 2, [6.0, 6.0]],
        [1, 3, 0, 2, 1, 2, [6.0, 6.0]],
        [2, 3, 1, 2, 0, 1, [6.0, 6.0]],
    ]


@pytest.mark.job
def test_the_rendezvous_listens_at_the_given_address_alone_and_only_on_host_0(hosts: Hosts):
    first = hosts.start(0, "open(f'rank-{rank}', 'w').write('ready'); time.sleep(600)")
    hosts.wait_for_file("rank-0")
    listening = [c.laddr for c in psutil.Process(first.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [tuple(address) for address in listening] == [("127.0.0.1", hosts.port)]
    second = hosts.start(1, "open(f'rank-{rank}', 'w').write('ready'); time.sleep(600)")
    hosts.wait_for_file("rank-2")
    assert not [c for c in psutil.Process(second.pid).net_connections() if c.status == psutil.CONN_LISTEN]


@pytest.mark.job
def test_a_killed_rank_is_reported_and_takes_along_the_others_of_its_host_even_those_that_will_not(hosts: Hosts):
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"rank-{rank}", "w").write(str(os.getpid()))
        time.sleep(600)
    """
    process = hosts.start(0, script, hosts="--hosts=127.0.0.1:3,127.0.0.2:1")
    pids = [int(hosts.wait_for_file(f"rank-{rank}")) for rank in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 137
    assert read_deaths(output) == [(1, -signal.SIGKILL)], "not those that were ended for it"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.job
def test_a_request_to_end_reaches_the_ranks_but_not_the_processes_that_they_have_started(hosts: Hosts):
    script = """
        def save(*_):
            child.kill()
            open(f"saved-{rank}", "w").write(str(child.wait()))
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(f"rank-{rank}", "w").write("ready")
        while True:
            time.sleep(0.1)
    """
    process = hosts.start(0, script, hosts="--hosts=127.0.0.1:2,127.0.0.2:1")
    for rank in range(2):
        hosts.wait_for_file(f"rank-{rank}")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    assert [(hosts.folder / f"saved-{rank}").read_text() for rank in range(2)] == ["-9", "-9"], (
        "not the rank's own doing"
    )


@pytest.mark.job
def test_a_host_that_waits_for_host_0_can_be_asked_to_end(hosts: Hosts):
    process = hosts.start(1, "open(f'rank-{rank}', 'w').write('started')")
    hosts.wait(lambda: signal.SIGTERM in caught(process))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert (output, process.returncode) == ("error: ended before the ranks had met\n", 143)
    assert list(hosts.folder.iterdir()) == []


def caught(process: "subprocess.Popen[str]") -> set[signal.Signals]:
    """Signals that a process has a handler of its own for."""
    line = next(x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
    mask = int(line.split()[1], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


@pytest.mark.job
def test_a_taken_port_is_named_at_once(hosts: Hosts):
    with socket.create_server(("127.0.0.1", hosts.port)):
        process = hosts.start(0, "pass")
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert f"cannot meet at 127.0.0.1:{hosts.port}: Address already in use; give another cluster.master_port" in output


@pytest.mark.job
def test_a_host_that_has_not_the_address_which_the_plan_gives_it_is_refused(hosts: Hosts):
    process = hosts.start(0, "pass", hosts="--hosts=203.0.113.7:1,127.0.0.2:1", interface="")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert output.startswith("error: 203.0.113.7 is no address of this host (")
    assert "127.0.0.1 (lo)" in output
    assert "correct --ips" in output
