"""A job on three hosts, which are three addresses of this machine, ends clearly after any fault of ranks, agents or the
leader."""

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mtrain.core.interfaces import Command, Host, HostedJob
from mtrain.errors import UsageError
from mtrain.jobs.hosts.agent_processes import AgentProcesses
from mtrain.jobs.hosts.connected_hosts import ConnectedHosts
from mtrain.jobs.hosts.disconnection import Cause, Disconnection
from mtrain.jobs.hosts.host_log import HostLog
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.start_failures import SSH
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.run.attempt import Attempt, Limits
from mtrain.jobs.run.metrics_place import MetricsPlace
from mtrain.jobs.run.outcome import Loss, Outcome, Pause
from mtrain.records.console import Plain
from mtrain.system import processes
from mtrain.system.environment import caller
from tests.ports import held_port

RANKS = Path(__file__).parents[1] / "launchers" / "ranks.py"
HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
QUICK = Limits(silence_s=30.0, settle_s=1.5, ending_s=10.0, straggling_s=60.0)
SOON = Limits(silence_s=8.0, settle_s=1.0, ending_s=10.0)


class Direct:
    """Starts a rank itself, without a starter in between."""

    agent = True
    forwards_signals = False

    def deaths(self, log, status):
        return []

    def own_logs(self, command):
        return None


def agents(environ) -> AgentProcesses:
    """Agents of the hosts, which are all this machine, so that no command is needed."""
    return AgentProcesses(
        HostedJob(hosts=HOSTS, agent=("python",)), [()] * 3, environ=environ, means=SSH, directly_here=True
    )


def make_plan(run_dir: Path, *behaviours: str, max_restarts: int = 0) -> Plan:
    hosts = [Host(address=address) for address in HOSTS]
    commands = [
        Command(
            host=host.address,
            argv=[sys.executable, str(RANKS), behaviour, "--run-dir", str(run_dir)],
            env={"RANK": str(node), "MASTER_PORT": "7"},
        )
        for node, (host, behaviour) in enumerate(zip(hosts, behaviours, strict=True))
    ]
    return Plan(
        title="test",
        source="test",
        run_dir=run_dir,
        resume=None,
        backend="test",
        launcher_name="direct",
        launcher=Direct(),
        hosts=hosts,
        commands=commands,
        max_restarts=max_restarts,
        log_dir=None,
        numbers={},
        on_cpu=True,
    )


class Job:
    """A job of three hosts in this process, and what came of it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.shown = io.StringIO()
        self.requests = processes.Requests()
        self.plans = []
        self.members = {}
        self.result = None

    def again(self, plan, checkpoint, nodes):
        self.plans.append(checkpoint)
        return plan

    def run(self, plan: Plan, *, limits: Limits = QUICK, forwarded=None) -> None:
        with ExitStack() as stack:
            gathering = agents(caller())
            stack.callback(gathering.close)
            self.members, missing = gathering.gather(range(3), timeout_s=60, stop=lambda: False)
            assert missing == []
            attempts = ConnectedHosts(
                members=self.members,
                gathering=gathering,
                display=Plain(self.shown, title="test"),
                requests=self.requests,
                files=lambda plan: {"spec.json": "{}\n"},
                replan=self.again,
                forwarded=forwarded or {},
                limits=limits,
                back_s=30.0,
            )
            self.result = attempts.run(plan)
            for member in self.members.values():
                member.channel.send({"do": "bye"})

    def agent(self, node: int) -> psutil.Process:
        return psutil.Process(self.members[node].hello["pid"])


def living(run_dir: Path) -> list[int]:
    """Processes whose command line names this run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def until(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    actual = Job(tmp_path)
    yield actual
    until(lambda: living(tmp_path) == [])


@pytest.fixture
def meanwhile(tmp_path):
    """Calls something in another thread once all ranks have said that they are ready."""
    threads = []

    def start(action) -> None:
        def wait_and_act() -> None:
            until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
            action()

        threads.append(threading.Thread(target=wait_and_act))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.job
def test_a_job_that_ends_well_gives_0_and_shows_the_records_of_rank_0(job, tmp_path):
    job.run(make_plan(tmp_path, *["succeed"] * 3))
    assert (job.result.code, job.result.text) == (0, "")
    assert "end: done" in job.shown.getvalue()
    assert (tmp_path / "spec.json").read_text() == "{}\n"
    assert sorted(path.name for path in (tmp_path / "logs").glob("host-*")) == [
        "host-0.log",
        "host-1.log",
        "host-2.log",
    ]


@pytest.mark.job
def test_the_first_failing_rank_is_told_with_its_host_and_ranks_that_hang_are_ended_everywhere(job, tmp_path):
    job.run(make_plan(tmp_path, *["rank_1_raises_and_0_hangs"] * 3))
    lines = job.result.text.splitlines()
    assert job.result.code == 1
    assert lines[0].startswith("rank 1 on 127.0.0.2 (")
    assert lines[1] == f"log: {job.members[1].label}:{tmp_path}/logs/rank-1.log"
    assert lines[-1] == "ValueError: the seventh image is upside down"


@pytest.mark.job
def test_an_expected_error_gives_its_own_exit_code(job, tmp_path):
    job.run(make_plan(tmp_path, "save_when_asked", "refuse", "save_when_asked"))
    assert (job.result.code, job.result.text.splitlines()[-1]) == (2, "error: train: 3 images cannot be read")


@pytest.mark.job
def test_a_rank_that_a_signal_ends_is_named_with_its_host(job, tmp_path):
    job.run(make_plan(tmp_path, "save_when_asked", "save_when_asked", "die_of_sigsegv"))
    assert job.result.code == 1
    assert "starting again" not in job.shown.getvalue(), "no restart was allowed"
    last = job.result.text.splitlines()[-1]
    assert (
        last
        == f"error: the starter of the ranks on {job.members[2].label} was ended by signal 11 (SIGSEGV): a crash in native code"
    )


@pytest.mark.job
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_request_to_end_lets_every_rank_on_every_host_save(job, tmp_path, meanwhile, number, code):
    meanwhile(lambda: job.requests.take(number))
    job.run(make_plan(tmp_path, *["save_when_asked"] * 3))
    assert job.result.code == code
    assert "saving and ending" in job.shown.getvalue()
    assert "state saved; go on with --resume" in job.result.text
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))


@pytest.mark.job
def test_a_second_request_ends_ranks_that_do_not_listen(job, tmp_path, meanwhile):
    def ask_twice() -> None:
        job.requests.take(signal.SIGINT)
        until(lambda: "saving and ending" in job.shown.getvalue())
        job.requests.take(signal.SIGINT)

    meanwhile(ask_twice)
    job.run(make_plan(tmp_path, *["ignore_requests"] * 3))
    assert job.result.code == 130
    assert "ended before the state was saved; there is no checkpoint" in job.result.text


@pytest.mark.job
def test_an_agent_that_is_asked_to_end_ends_the_whole_job_politely(job, tmp_path, meanwhile):
    meanwhile(lambda: job.agent(2).terminate())
    job.run(make_plan(tmp_path, *["save_when_asked"] * 3))
    assert job.result.code == 143
    assert f"{job.members[2].label} was asked to end the job" in job.shown.getvalue()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))


@pytest.mark.smoke
@pytest.mark.job
def test_a_request_to_all_hosts_at_once_lets_every_rank_save(job, tmp_path, meanwhile):
    """A scheduler that cancels a job, or deletes its pods, signals every host: that is one request, told in many
    places."""

    def cancel() -> None:
        for node in range(3):
            job.agent(node).terminate()
        job.requests.take(signal.SIGTERM)

    meanwhile(cancel)
    job.run(make_plan(tmp_path, *["save_slowly_when_asked"] * 3))
    assert job.result.code == 143
    assert "state saved; go on with --resume" in job.result.text
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))


@pytest.mark.job
@pytest.mark.parametrize("asked", ["one agent", "every host"])
def test_a_request_to_save_at_any_host_reaches_the_ranks_of_all_once_and_the_job_goes_on(
    job, tmp_path, meanwhile, asked
):
    files = [tmp_path / f"requested-{rank}" for rank in range(3)]

    def ask() -> None:
        for node in range(3) if asked == "every host" else [2]:
            job.agent(node).send_signal(signal.SIGUSR1)
        if asked == "every host":
            job.requests.saves += 1
        until(lambda: all(file.exists() for file in files))
        time.sleep(1.0)  # for whatever else would be passed on
        (tmp_path / "go").touch()

    meanwhile(ask)
    job.run(make_plan(tmp_path, *["save_and_go_on_when_asked"] * 3))
    assert job.result.code == 0, job.result.text
    assert [file.read_text() for file in files] == ["saved\n"] * 3
    note = "SIGUSR1: the ranks were asked to save at the next update, and to go on"
    assert job.shown.getvalue().count(note) == 1


@pytest.mark.job
def test_a_second_request_at_another_host_ends_ranks_that_do_not_listen(job, tmp_path, meanwhile):
    def ask_twice_there() -> None:
        job.agent(2).terminate()
        until(lambda: "saving and ending" in job.shown.getvalue())
        time.sleep(processes.SAME_REQUEST_S)  # a SIGTERM before is no second request
        job.agent(2).terminate()

    meanwhile(ask_twice_there)
    job.run(make_plan(tmp_path, *["ignore_requests"] * 3))
    assert job.result.code == 143
    assert "ended before the state was saved; there is no checkpoint" in job.result.text


@pytest.mark.job
def test_a_host_whose_agent_dies_is_the_cause_and_nothing_is_left_on_any(job, tmp_path, meanwhile):
    meanwhile(lambda: job.agent(1).kill())
    job.run(make_plan(tmp_path, *["save_when_asked"] * 3))
    assert job.result.code == 1
    lines = job.result.text.splitlines()
    assert lines[-1] == (
        f"error: host {job.members[1].label} is lost: the connection was closed (its agent ended with signal 9)"
    )
    assert lines[0] == f"rank 1 ran there; log: {job.members[1].label}:{tmp_path}/logs/rank-1.log"


@pytest.mark.job
def test_a_silent_host_is_lost_and_nothing_is_left_on_this_machine(job, tmp_path, meanwhile):
    def silence() -> None:
        job.agent(1).suspend()
        job.members[1].channel.silence_s = 2.0  # of this host alone: on a busy machine others may be slow

    meanwhile(silence)
    job.run(make_plan(tmp_path, *["ignore_requests"] * 3))
    assert job.result.code == 1
    last = job.result.text.splitlines()[-1]
    assert last.startswith(f"error: host {job.members[1].label} has been silent for ")
    assert "could not be told to end" in job.shown.getvalue()


@pytest.mark.job
def test_a_failed_job_is_started_again_on_all_hosts(job, tmp_path):
    plan = make_plan(tmp_path, "succeed", "fail_the_first_time", "succeed", max_restarts=1)
    job.run(plan)
    assert job.result.code == 0
    assert job.plans == [None]
    assert "RuntimeError: a cosmic ray\nstarting again from the beginning: " in job.shown.getvalue()
    assert [path.name for path in (tmp_path / "failures").glob("rank-*")] == []


@pytest.mark.smoke
@pytest.mark.job
def test_a_job_is_started_again_on_a_host_that_was_lost_and_came_back(job, tmp_path, meanwhile):
    def kill() -> None:
        for rank in range(3):
            (tmp_path / f"ready-{rank}").unlink()
        job.agent(2).kill()
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
        job.requests.take(signal.SIGTERM)

    meanwhile(kill)
    job.run(make_plan(tmp_path, *["save_when_asked"] * 3, max_restarts=1))
    assert job.result.code == 143
    assert "is lost: the connection was closed" in job.shown.getvalue()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))
    known = HostLog(tmp_path).read()
    assert (known["hosts"], known["restarts"]) == ([member.label for member in job.members.values()], 1)
    assert [(loss["lost"], loss["why"]) for loss in known["lost"]] == [
        (job.members[2].label, "the connection was closed")
    ]


def restarts_at(address: str, port: int) -> str:
    """What a host tells Prometheus about restarts and hosts; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return ""
    return "; ".join(line for line in lines if line.startswith(("mtrain_restarts_total", "mtrain_hosts{")))


@pytest.mark.job
def test_every_host_tells_of_a_restart_also_one_that_was_lost_and_came_back(job, tmp_path, meanwhile):
    port, run = held_port(), f'{{run="{tmp_path.name}"}}'
    told = []

    def kill() -> None:
        told.append([restarts_at(host, port) for host in HOSTS])
        for rank in range(3):
            (tmp_path / f"ready-{rank}").unlink()
        job.agent(2).kill()
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
        told.append([restarts_at(host, port) for host in HOSTS])
        job.requests.take(signal.SIGTERM)

    meanwhile(kill)
    metrics = MetricsPlace(port=port, address="host")
    job.run(replace(make_plan(tmp_path, *["save_when_asked"] * 3, max_restarts=1), metrics=metrics))
    assert told == [[f"mtrain_restarts_total{run} {n}.0; mtrain_hosts{run} 3.0"] * 3 for n in (0, 1)]
    until(lambda: [restarts_at(host, port) for host in HOSTS] == ["", "", ""])


@pytest.mark.job
def test_a_port_for_metrics_that_is_taken_on_one_host_starts_nothing(job, tmp_path):
    port = held_port()
    plan = replace(make_plan(tmp_path, *["save_when_asked"] * 3), metrics=MetricsPlace(port=port, address="host"))
    with socket.create_server((HOSTS[1], port)), pytest.raises(UsageError) as error:
        job.run(plan)
    assert str(error.value).endswith(
        f"report.metrics_port: {port} is in use on {HOSTS[1]}; give each job of a host a port of its own, or end what "
        "listens there"
    )
    assert list(tmp_path.glob("ready-*")) == []


@pytest.mark.job
def test_a_host_that_is_lost_after_it_has_ended_well_is_brought_back_for_the_next_attempt(job, tmp_path, monkeypatch):
    ended, take = threading.Event(), Attempt._take

    def watched(self, node, message, now):
        take(self, node, message, now)
        if node == 1 and message.get("event") == "ended":
            ended.set()

    monkeypatch.setattr(Attempt, "_take", watched)
    plan = make_plan(tmp_path, "fail_the_first_time_when_told", "succeed", "succeed", max_restarts=1)

    def lose_an_idle_host() -> None:
        ended.wait(120.0)  # the leader knows: it would bring back any host that was lost before
        job.agent(1).kill()
        until(lambda: job.members[1].channel.lost is not None)
        (tmp_path / "go").touch()

    losing = threading.Thread(target=lose_an_idle_host)
    losing.start()
    job.run(plan)
    losing.join()
    assert job.result.code == 0, job.result.text


@pytest.mark.job
def test_agents_are_given_the_time_to_end_by_themselves(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, pathlib, time\n"
        f"atexit.register(lambda: (time.sleep(0.5), (pathlib.Path({str(tmp_path)!r}) / f'ended-{{os.getpid()}}').touch()))\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**caller(), "PYTHONPATH": os.pathsep.join(paths)}
    gathering = agents(environ)
    members, _ = gathering.gather(range(3), timeout_s=60, stop=lambda: False)
    for member in members.values():
        member.channel.send({"do": "bye"})
    gathering.close()
    ended = {f"ended-{member.hello['pid']}" for member in members.values()}
    assert {path.name for path in tmp_path.glob("ended-*")} == ended


@pytest.mark.job
def test_ranks_see_the_plans_variables_the_forwarded_ones_and_no_stale_ones(job, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_PORT", "9")
    monkeypatch.setenv("KEPT", "here")
    monkeypatch.setenv("NCCL_DEBUG", "the host's own, which the leader's replaces")
    forwarded = {"NCCL_DEBUG": "INFO", "MASTER_PORT": "the leader's, which the plan's replaces"}
    job.run(make_plan(tmp_path, "show_environment", "succeed", "succeed"), forwarded=forwarded)
    records = dict(
        line.split("=", 1) for line in (tmp_path / "environment.txt").read_text().splitlines() if "=" in line
    )
    assert "WORLD_SIZE" not in records
    assert (records["MASTER_PORT"], records["KEPT"], records["NCCL_DEBUG"]) == ("7", "here", "INFO")
    assert records["GLOO_SOCKET_IFNAME"] == records["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.job
def test_a_folder_in_which_another_job_runs_is_refused(job, tmp_path):
    from mtrain.system.runfolder import RunFolder, take_folder

    with (
        take_folder(RunFolder(tmp_path), node=1),
        pytest.raises(UsageError, match=r"127\.0\.0\.2 .*is running a job in this"),
    ):
        job.run(make_plan(tmp_path, *["succeed"] * 3))


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_leader_that_is_lost_takes_everything_along(tmp_path, number):
    script = textwrap.dedent(
        f"""
        import importlib.util, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("attempts", {str(Path(__file__))!r})
        attempts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(attempts)
        folder = Path({str(tmp_path)!r})
        attempts.Job(folder).run(attempts.make_plan(folder, *["ignore_requests"] * 3), limits=attempts.SOON)
        """
    )
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
        assert len(living(tmp_path)) == 3
        leader.send_signal(number)
        until(lambda: living(tmp_path) == [])
    finally:
        leader.kill()
        leader.wait()


@pytest.mark.job
def test_a_leader_that_stood_still_says_so_and_blames_no_host(tmp_path):
    script = f"""
        import importlib.util, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("attempts", {str(Path(__file__))!r})
        attempts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(attempts)
        folder = Path({str(tmp_path)!r})
        job = attempts.Job(folder)
        job.run(attempts.make_plan(folder, *["ignore_requests"] * 3), limits=attempts.SOON)
        print(job.result.code, job.result.text, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
        leader.send_signal(signal.SIGSTOP)
        until(lambda: living(tmp_path) == [])
        leader.send_signal(signal.SIGCONT)
        output, _ = leader.communicate(timeout=60)
        assert output.startswith("1 "), output
        assert "the process that leads the job stood still for" in output
        assert "host 127.0.0" not in output
    finally:
        leader.kill()
        leader.wait()


@pytest.mark.slow
@pytest.mark.parametrize("suspended", ["all hosts", "one host"])
def test_hosts_that_are_suspended_together_go_on_and_one_that_is_suspended_alone_is_named(tmp_path, suspended):
    """As `scontrol suspend` does it: every process is stopped, for longer than silence may last, and goes on later."""
    script = f"""
        import importlib.util, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("attempts", {str(Path(__file__))!r})
        attempts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(attempts)
        folder = Path({str(tmp_path)!r})
        job = attempts.Job(folder)
        job.run(attempts.make_plan(folder, *["save_and_go_on_when_asked"] * 3), limits=attempts.SOON)
        print(job.result.code, job.result.text, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)))
        actual = psutil.Process(leader.pid)
        third = next(
            agent
            for agent in actual.children()
            if any("RANK" in c.environ() and c.environ()["RANK"] == "2" for c in agent.children())
        )
        stopped = [actual, *actual.children(recursive=True)] if suspended == "all hosts" else [third, *third.children()]
        for process in stopped:
            process.suspend()
        time.sleep(SOON.silence_s + 4.0)
        for process in stopped:
            if process.is_running():
                process.resume()
                time.sleep(0.2)  # they do not go on at the same moment
        time.sleep(SOON.silence_s / 2)
        (tmp_path / "go").touch()
        output, _ = leader.communicate(timeout=60)
        if suspended == "all hosts":
            assert output == "0 \n"
        else:
            assert output.startswith("1 "), output
            assert "error: host 127.0.0.3" in output
            assert "has been silent for" in output
        until(lambda: living(tmp_path) == [])
    finally:
        leader.kill()
        leader.wait()


# ------------------------------------------------------------------------------------------------------------- verdicts
CLOSED = Disconnection(cause=Cause.CLOSED_THERE)
SILENT = Disconnection(cause=Cause.SILENT, silent_s=12.4)


def outcome_of(tmp_path, *, failed_at: float, lost_at: float, why: Disconnection = CLOSED) -> Outcome:
    """Rank 1 on the second host failed, and that host was lost."""
    members = {node: Member(node=node, host=host, channel=None, hello={}) for node, host in enumerate(HOSTS)}
    return Outcome(
        plan=make_plan(tmp_path, *["succeed"] * 3),
        members=members,
        failures=[{"rank": 1, "when": failed_at, "error": "ValueError: why", "traceback": "ValueError: why"}],
        lost={1: Loss(at=lost_at, why=why, last_heard=0.0)},
    )


def test_a_host_that_is_lost_after_its_rank_has_failed_is_not_the_cause(tmp_path):
    message = outcome_of(tmp_path, failed_at=10.0, lost_at=11.0).judge()
    assert message.headline == "rank 1 on 127.0.0.2 failed first: ValueError: why"


def test_a_host_that_is_lost_before_its_rank_fails_is_the_cause(tmp_path):
    message = outcome_of(tmp_path, failed_at=11.0, lost_at=10.0).judge()
    assert message.headline == "host 127.0.0.2 is lost: the connection was closed"


def test_a_silent_host_is_named_with_its_silence_and_may_still_run_ranks(tmp_path):
    outcome = outcome_of(tmp_path, failed_at=11.0, lost_at=10.0, why=SILENT)
    assert outcome.judge().headline.startswith(
        "host 127.0.0.2 has been silent for 12 s: network or power; last heard at "
    )
    assert "127.0.0.2" in outcome.unheard()


@pytest.mark.parametrize(
    ("why", "lost_at", "is_blamed"),
    [(CLOSED, 10.5, False), (CLOSED, 9.5, True), (CLOSED, 16.0, True), (SILENT, 10.5, True)],
    ids=["closed meanwhile", "closed before", "closed long after", "silent"],
)
def test_a_host_that_gave_up_a_leader_which_stood_still_is_not_to_blame(tmp_path, why, lost_at, is_blamed):
    outcome = outcome_of(tmp_path, failed_at=20.0, lost_at=lost_at, why=why)
    outcome.pause = Pause(seconds=30.0, until=10.0)
    assert outcome.judge().headline.startswith(
        "host 127.0.0.2" if is_blamed else "the process that leads the job stood"
    )


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.SILENT])
def test_no_other_loss_is_taken_for_silence_whatever_the_words_are(tmp_path, cause, monkeypatch):
    """Even if the texts all began with the same words, the causes would be told apart."""
    monkeypatch.setattr(Disconnection, "__str__", lambda self: "silent for 99 s")
    outcome = outcome_of(tmp_path, failed_at=11.0, lost_at=10.0, why=Disconnection(cause=cause))
    assert outcome.judge().headline == "host 127.0.0.2 is lost: silent for 99 s"
    assert "127.0.0.2" not in outcome.unheard()


@pytest.mark.parametrize(("reported", "here", "blamed"), [(False, False, [2]), (True, False, []), (False, True, [])])
def test_a_killed_starter_is_to_blame_unless_the_job_itself_has_killed_it(tmp_path, reported, here, blamed):
    outcome = outcome_of(tmp_path, failed_at=2.0, lost_at=1.0)
    outcome.lost.clear()
    well = {"status": 0, "log": "", "told": False, "when": 3.0}
    outcome.ended = {0: well, 1: well, 2: well | {"status": -9, "told": reported, "ended_here": here}}
    assert outcome.killed_starters() == blamed
    blames_starter = "the starter of the ranks on 127.0.0.3 was ended by signal 9" in outcome.judge().headline
    assert blames_starter == bool(blamed)


@pytest.mark.job
def test_every_host_of_a_job_that_fails_tells_prometheus_before_its_port_is_closed(job, tmp_path):
    port, told, closed = held_port(), {host: [] for host in HOSTS}, set()

    def read_like_prometheus() -> None:
        while len(closed) < len(HOSTS):
            for host in HOSTS:
                try:
                    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
                        text = answer.read().decode()
                except OSError:
                    closed.update([host] if told[host] else [])
                    continue
                told[host].append(f'mtrain_job_failed{{run="{tmp_path.name}"}} 1.0' in text)
            if all(told.values()):
                (tmp_path / "go").touch()
            time.sleep(0.05)

    reader = threading.Thread(target=read_like_prometheus, daemon=True)
    reader.start()
    plan = make_plan(tmp_path, *["fail_the_first_time_when_told"] * 3)
    job.run(replace(plan, metrics=MetricsPlace(port=port, address="host")))
    assert job.result.code == 1
    until(lambda: len(closed) == len(HOSTS))
    assert {host: (values[0], values[-1]) for host, values in told.items()} == dict.fromkeys(HOSTS, (False, True))
