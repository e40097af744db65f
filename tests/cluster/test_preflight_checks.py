"""Preflight: facts of several hosts compared, and asked of real agents over real channels."""

import copy
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from mtrain.jobs.hosts import start_failures
from mtrain.jobs.hosts.channel import Channel
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.plan import make_plan
from mtrain.jobs.preflight.checks import preflight
from mtrain.jobs.preflight.comparison import HostFacts, compare
from mtrain.jobs.preflight.findings import Finding, bad, show, table, worst
from mtrain.jobs.preflight.requirements import requirements
from mtrain.spec import config

GIB = 1 << 30
MODULES = {"torch": "install it there with: pip install torch"}


def wanted(address, **more):
    return {
        "address": address,
        "names": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        "slots": 1,
        "ports": [],
        "bytes": {"least": GIB, "plenty": 2 * GIB},
        "modules": MODULES,
        "device": "auto",
        "devices": None,
        **more,
    }


FACTS = {
    "host": "node",
    "identity": "",
    "addresses": [["lo", "127.0.0.1"]],
    "names": {"10.0.0.1": ["10.0.0.1"], "10.0.0.2": ["10.0.0.2"], "10.0.0.3": ["10.0.0.3"]},
    "python": {
        "executable": "/py",
        "python": "3.11.7",
        "packages": {"numpy": "2.1.0"},
        "modules": {"torch": "torch 2.13.0"},
        "code": {"folder": "/src/mtrain", "digest": "a" * 64},
    },
    "ports": {},
    "disk": {"free": 9 * GIB, "total": 10 * GIB, "path": "/runs", "writable": True},
    "shm": {"free": GIB, "total": GIB},
    "devices": {"present": 0, "models": []},
    "cores": 4,
    "data": {"root": "/data", "complete": True, "files": 9, "sized": 9, "bytes": 1000, "digest": "x"},
    "files": {},
}


def asked(tmp_path, *overrides, backend="fleet"):
    """Return the questions that a spec asks its two hosts."""
    flags = {"cluster.ips": ["10.0.0.1", "10.0.0.2"], "backend.name": backend, "train.batch_size": 16}
    loaded = config.load("digits", overrides=overrides, flags=flags)
    plan = make_plan(loaded, run_dir=tmp_path, resume=None, machine=Machine(cores=2, devices=0))
    return requirements(loaded.job, plan)


def test_a_spec_asks_for_its_ports_modules_files_and_data(tmp_path):
    overrides = (
        "cluster.master_port=29777",
        "cluster.start_port=17000",
        "cluster.nproc_per_node=2",
        "cluster.devices=[0,1]",
    )
    first, second = asked(tmp_path, *overrides, "data.format=coco", "data.root=images", "model.weights=w.pt")
    ranks = [(17000, "cluster.start_port"), (17001, "cluster.start_port")]
    assert first["ports"] == [(29777, "cluster.master_port"), *ranks]
    assert second["ports"] == ranks
    assert (second["address"], second["slots"], second["devices"]) == ("10.0.0.2", 2, [0, 1])
    assert second["data"] == {"root": "images", "skip": ["runs"]}
    assert second["files"] == {"model.weights": "w.pt"}
    assert list(second["modules"]) == ["paddle"]


def test_what_the_system_chooses_or_a_plugin_makes_is_not_asked_for(tmp_path):
    for host in asked(tmp_path, "data.root=made", backend="deepspeed"):
        assert (host["ports"], host["data"], host["files"]) == ([], None, {})
        assert list(host["modules"]) == ["torch", "deepspeed"]
        assert "[deepspeed]" in host["modules"]["deepspeed"]


def hosts(**change):
    """Three hosts that agree, but for ``change`` in the facts of the second: dotted path with ``__`` -> value."""
    host_facts = []
    for index in range(3):
        facts, address = copy.deepcopy(FACTS), f"10.0.0.{index + 1}"
        facts["host"] = f"node{index + 1}"
        facts["identity"] = f"machine {index + 1}"
        facts["addresses"] += [["eth0", address]]
        host_facts.append(HostFacts(index=index, required=wanted(address), facts=facts))
    for path, value in change.items():
        *parents, last = path.split("__")
        place = host_facts[1].facts
        for parent in parents:
            place = place[parent]
        place[last] = value
    return host_facts


def only(host_facts):
    """The one finding that is not ok."""
    (actual,) = [finding for finding in compare(host_facts) if finding.state != "ok"]
    return actual


def test_hosts_that_agree_have_one_good_finding_for_each_check():
    actual = compare(hosts())
    assert [(finding.check, finding.state) for finding in actual] == [
        (check, "ok")
        for check in ("address", "clock", "python", "mtrain", "packages", "data", "ports", "disk", "devices")
    ]


WRONG = {
    "not its own address": (
        {"addresses": [["eth0", "10.0.9.9"]]},
        "address",
        "10.0.0.2 is no address of this host; it has 10.0.9.9 (eth0)",
    ),
    "one machine twice": ({"identity": "machine 1"}, "address", "is the same machine as 10.0.0.1 (node1)"),
    "other minor Python": (
        {"python__python": "3.12.1"},
        "python",
        "is Python 3.12.1, expected 3.11.7 as on 10.0.0.1 (node1)",
    ),
    "no interpreter": ({"python": {"error": "/py is not there"}}, "python", "/py is not there"),
    "no mtrain": ({"python__code": None}, "mtrain", "/py has no mtrain"),
    "no mtrain-trace": (
        {"python__modules__mtrain_trace": None},
        "mtrain",
        "/py has no mtrain-trace, which mtrain needs",
    ),
    "other source": ({"python__code__digest": "b" * 64}, "mtrain", "is not that of 10.0.0.1 (node1)"),
    "no framework": ({"python__modules__torch": None}, "packages", "/py has no torch"),
    "other framework": (
        {"python__modules__torch": "torch 2.12.0"},
        "packages",
        "torch is of torch 2.12.0, expected torch 2.13.0",
    ),
    "no data": (
        {"data": {"root": "/data", "error": "No such file or directory"}},
        "data",
        "data.root /data: No such file",
    ),
    "other data": ({"data__digest": "y"}, "data", "9 files, 1,000 bytes"),
    "small disk": ({"disk__free": 50 << 20}, "disk", "50 MiB free at /runs, expected 1.0 GiB at the least"),
    "read-only disk": ({"disk__writable": False}, "disk", "/runs is not writable"),
}


@pytest.mark.parametrize(("change", "check", "text"), WRONG.values(), ids=WRONG)
def test_what_keeps_a_job_from_starting_is_one_line_with_its_host_and_a_remedy(change, check, text):
    actual = only(hosts(**change))
    assert (actual.check, actual.state, actual.hosts) == (check, "bad", ("10.0.0.2 (node2)",))
    assert text in actual.text
    assert actual.remedy
    assert "\n" not in actual.line()


DOUBTFUL = {
    "other patch of Python": ({"python__python": "3.11.9"}, "python"),
    "other numpy": ({"python__packages__numpy": "2.0.0"}, "packages"),
    "data too large": ({"data__complete": False}, "data"),
    "little room": ({"disk__free": GIB + 1}, "disk"),
}


@pytest.mark.parametrize(("change", "check"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_what_may_go_well_is_a_warning(change, check):
    actual = only(hosts(**change))
    assert (actual.check, actual.state) == (check, "warning")
    assert bad([actual]) == []


def test_several_things_wrong_at_once_are_all_told():
    host_facts = hosts(python__python="3.12.1", data__digest="y", disk__free=0)
    host_facts[0].required = wanted("10.0.0.1", ports=[[29500, "cluster.master_port"]])
    host_facts[0].facts["ports"] = {"29500": "process 7 (sshd) listens there"}
    host_facts[2].skew_s = (30.0, 30.4)
    actual = [finding for finding in compare(host_facts) if finding.state != "ok"]
    assert [finding.check for finding in actual] == ["clock", "python", "data", "ports", "disk"]
    assert "29500 is taken on 10.0.0.1: process 7 (sshd) listens there" in actual[3].text


def test_a_name_that_is_loopback_on_its_own_host_is_found():
    """Debian and Ubuntu write 127.0.1.1 beside a host's own name."""
    host_facts = hosts()
    for index, host in enumerate(host_facts):
        host.required = wanted(f"node{index + 1}", names=["node1", "node2", "node3"])
        host.facts["names"] = {f"node{number}": [f"10.0.0.{number}"] for number in (1, 2, 3)}
    assert compare(host_facts)[0].state == "ok"
    host_facts[1].facts["names"]["node2"] = ["127.0.1.1"]
    actual = only(host_facts)
    assert actual.text.startswith(
        "node2 means 127.0.1.1 on that host itself, where no other host reaches it; it has 10.0.0.2 (eth0)"
    )


def test_an_own_name_that_is_loopback_does_no_harm_where_addresses_are_given():
    host_facts = hosts()
    host_facts[1].facts["names"]["node2"] = ["127.0.1.1"]
    assert "node2 eth0 (not 127.0.1.1, as its own name says)" in compare(host_facts)[0].text


def test_a_name_that_means_another_machine_elsewhere_is_found():
    host_facts = hosts()
    for index, host in enumerate(host_facts):
        host.required = wanted(f"node{index + 1}")
        host.facts["names"] = {f"node{number}": [f"10.0.0.{number}"] for number in (1, 2, 3)}
    host_facts[0].facts["names"]["node3"] = ["10.9.9.9"]
    assert only(host_facts).text == "takes node3 for 10.9.9.9, which is no address of that host"
    host_facts[0].facts["names"]["node3"] = []
    assert only(host_facts).text == "does not know the name node3"


@pytest.mark.parametrize(
    ("bounds", "message"),
    [((3.0, 3.5), "3.0 s ahead of"), ((-9.0, -8.0), "8.0 s behind"), ((-1.0, 60.0), None), ((1.0, 1.9), None)],
    ids=["ahead", "behind", "a slow answer proves nothing", "a little"],
)
def test_clocks_count_as_far_as_their_difference_is_certain(bounds, message):
    host_facts = hosts()
    host_facts[2].skew_s = bounds
    actual = compare(host_facts)[1]
    assert actual.check == "clock"
    assert (actual.state == "ok") if message is None else (actual.state == "warning" and message in actual.text)


def test_clocks_are_compared_with_that_of_the_first_host_not_with_this_machine():
    host_facts = hosts()
    for host in host_facts:
        host.skew_s = (60.0, 60.4)
    assert compare(host_facts)[1].state == "ok"
    host_facts[1].skew_s = (0.0, 0.4)
    (actual,) = [finding for finding in compare(host_facts) if finding.check == "clock"]
    assert (actual.hosts, actual.state) == ((host_facts[1].label,), "warning")
    assert "59.6 s behind that of 10.0.0.1 (node1)" in actual.text


@pytest.mark.parametrize(
    ("more", "present", "text"),
    [
        ({"devices": [0, 3]}, [4, 2, 4], "2 GPUs are there, 4 are asked for (cluster.devices: [0, 3])"),
        ({"device": "cuda"}, [1, 0, 1], "0 GPUs are there, 1 are asked for (backend.options.device: cuda)"),
        ({"slots": 2}, [2, 0, 2], "0 GPUs are there, 2 are asked for (one for each rank, as other hosts have)"),
        ({"device": "cpu"}, [2, 0, 2], None),
        ({}, [0, 0, 0], None),
    ],
    ids=["numbers", "cuda", "as the others", "cpu", "none anywhere"],
)
def test_gpus_that_are_asked_for_must_be_there(more, present, text):
    host_facts = hosts()
    for host, count in zip(host_facts, present, strict=True):
        host.required = wanted(host.address, **more)
        host.facts["devices"]["present"] = count
    actual = [finding for finding in compare(host_facts) if finding.check == "devices"]
    assert [finding.text for finding in actual if finding.state == "bad"] == ([text] if text else [])


def test_different_gpus_are_a_warning():
    host_facts = hosts(devices={"present": 1, "models": ["slow"]})
    for host in (host_facts[0], host_facts[2]):
        host.facts["devices"] = {"present": 1, "models": ["fast"]}
    assert "node2): slow" in only(host_facts).text


# ---------------------------------------------------------------------------------------------------------------- agents
@pytest.fixture
def agents():
    """Starts agents on this machine; channels to them."""
    with ExitStack() as held:

        def start(count):
            return [held.enter_context(_agent(number)) for number in range(count)]

        yield start


class _agent:
    def __init__(self, number):
        self._number = number

    def __enter__(self):
        argv = [sys.executable, "-m", "mtrain.jobs.hosts.agent"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with self._process.stdin as there, self._process.stdout as here:
            self.channel = Channel(os.dup(here.fileno()), os.dup(there.fileno()), peer=f"agent {self._number}")
        assert self.channel.wait(60.0)["event"] == "hello"
        return self.channel

    def __exit__(self, *error):
        self.channel.close()
        assert self._process.wait(60.0) == 1


def trial(folder, **more):
    return {
        **wanted("127.0.0.1", names=["127.0.0.1"], modules={"json": ""}),
        "cwd": str(folder),
        "run_dir": "runs/x",
        "bytes": {"least": 1, "plenty": 1},
        "python": None,
        "files": {},
        "data": None,
        **more,
    }


@pytest.mark.smoke
@pytest.mark.job
def test_agents_are_asked_and_reach_each_other(agents, tmp_path):
    actual = preflight(agents(3), [trial(tmp_path)] * 3)
    assert worst(actual) == "ok", table(actual)
    assert actual[-1].text == "all 6 ways between 3 hosts, over TCP"


@pytest.mark.job
def test_data_that_differ_a_taken_port_and_a_file_that_is_missing_are_told(agents, tmp_path):
    for side, size in (("left", 3), ("right", 5)):
        folder = tmp_path / side / "data"
        folder.mkdir(parents=True)
        for number in range(50):
            (folder / f"{number}.jpg").write_bytes(b"x" * (size if number == 7 else 1))
    (tmp_path / "left" / "w.pt").write_text("weights")
    more = {"data": {"root": "data"}, "files": {"model.weights": "w.pt"}}
    left, right = (trial(tmp_path / side, **more) for side in ("left", "right"))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        actual = preflight(agents(2), [{**left, "ports": [[port, "cluster.master_port"]]}, right])
    values = {finding.check: finding.text for finding in bad(actual)}
    assert sorted(values) == ["data", "files", "ports"], table(actual)
    assert (
        f"other files (50 files, 54 bytes; 127.0.0.1 ({socket.gethostname()}) has 50 files, 52 bytes)" in values["data"]
    )
    assert values["files"].endswith("w.pt: No such file or directory")
    assert f"{port} is taken on 127.0.0.1: process {os.getpid()} (" in values["ports"]


@pytest.mark.job
def test_an_agent_that_has_gone_is_a_finding_among_the_others(agents, tmp_path):
    first, second, third = agents(3)
    second.close()
    known_names = Finding(check="ssh", state="bad", text="no way", hosts=("10.0.0.9",))
    actual = preflight([None, first, second, third], [trial(tmp_path)] * 4, earlier=[known_names])
    assert actual[0] is known_names
    assert [finding.check for finding in bad(actual)] == ["ssh", "agent"]
    assert actual[-1].text == "all 2 ways between 2 hosts, over TCP"
    assert actual[-1].hosts == ("127.0.0.1", "127.0.0.1"), "nothing is said to be well on hosts that did not answer"


# ----------------------------------------------------------------------------------------------------------------- words
SAID = {
    "refused": ("ssh: connect to host b port 22: Connection refused", "start its ssh server"),
    "key": ("me@b: Permission denied (publickey).", "ssh-copy-id"),
    "unknown": (
        "No ED25519 host key is known for b and you have requested strict checking.\nHost key verification failed.",
        "log in once",
    ),
    "changed": ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
    "name": ("ssh: Could not resolve hostname b: Name or service not known", "give addresses"),
    "silent": ("ssh: connect to host b port 22: Connection timed out", "firewalls"),
    "hung up": ("kex_exchange_identification: Connection closed by remote host", "ssh -v b true"),
    "strange": ("something new", "ssh -v b true"),
}


@pytest.mark.parametrize(("output", "remedy"), SAID.values(), ids=SAID)
def test_what_ssh_says_becomes_a_remedy(output, remedy):
    actual = start_failures.explain("b", status=255, printed=output.splitlines(), python="/py", local=False)
    assert (actual.check, actual.state, actual.hosts) == ("ssh", "bad", ("b",))
    assert remedy in actual.remedy
    assert output.splitlines()[-1].removeprefix("ssh: ") in actual.text


@pytest.mark.parametrize(
    ("status", "output", "text"),
    [
        (127, "bash: line 1: /py: No such file or directory", "cannot run /py: bash"),
        (
            127,
            "setpriv: failed to execute ssh: No such file or directory",
            "ssh cannot be executed on this machine: setpriv",
        ),
        (1, "/py: Error while finding module specification: No module named 'mtrain'", "/py has no mtrain there"),
        (1, "ModuleNotFoundError: No module named 'mtrain_trace'", "/py has no mtrain-trace there"),
        (1, "ImportError: libfoo", "its agent did not start: ImportError: libfoo"),
        (255, "", "its agent did not start: exit code 255"),
    ],
    ids=["no interpreter", "no ssh", "no mtrain", "no mtrain-trace", "broken", "the agent's own status"],
)
def test_an_agent_that_does_not_start_says_why(status, output, text):
    actual = start_failures.explain("b", status=status, printed=[output], python="/py", local=status == 255)
    assert actual.text.startswith(text)


def test_a_table_is_plain_lines_where_there_is_no_terminal(capsys):
    rows = [
        Finding(check="disk", state="ok", text="9 GiB free"),
        Finding(check="reach", state="bad", text="silent", hosts=("10.0.0.2",), remedy="look at it"),
    ]
    show(rows, every="all 3 hosts", stream=sys.stdout)
    assert capsys.readouterr().out.splitlines() == [
        "disk   ok   all 3 hosts  9 GiB free",
        "reach  bad  10.0.0.2     silent; look at it",
    ]
    assert rows[1].line() == "reach 10.0.0.2: silent; look at it"
    assert rows[1].as_json()["hosts"] == ["10.0.0.2"]
