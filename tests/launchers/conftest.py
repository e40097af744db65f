"""Starting `ranks.py` through the real launchers, in this process or in a starter of its own."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from mtrain.core.interfaces import Host
from mtrain.jobs.hosts import this_host
from mtrain.jobs.hosts.this_host import ThisHost
from mtrain.jobs.plan.plan import Plan
from mtrain.launchers.deepspeed import DeepSpeedLauncher
from mtrain.launchers.fleetrun import Fleetrun
from mtrain.launchers.horovodrun import Horovodrun
from mtrain.launchers.local import Local
from mtrain.launchers.torchrun import Torchrun
from mtrain.records.console import Quiet
from mtrain.system.environment import caller, clean
from mtrain.system.launch_options import LaunchOptions
from tests.ports import held_port

RANKS = Path(__file__).with_name("ranks.py")
ROOT = Path(__file__).parents[2]


QUICK = replace(this_host.LIMITS, poll_s=0.05, leftover_s=1.0)
STARTERS = {"torchrun": Torchrun, "fleetrun": Fleetrun, "horovodrun": Horovodrun, "deepspeed": DeepSpeedLauncher}


def make_plan(
    run_dir: Path,
    behaviour: str,
    *,
    ranks: int = 1,
    max_restarts: int = 0,
    launcher_name: str = "torchrun",
    log_bytes: int | None = None,
) -> Plan:
    kind = STARTERS[launcher_name] if ranks > 1 else Local
    port = held_port()
    launcher = kind(kind.Options(**LaunchOptions(python=sys.executable, master_port=port).model_dump()))
    hosts = [Host(address="127.0.0.1", slots=ranks)]
    argv = [str(RANKS), behaviour, "--run-dir", str(run_dir)]
    return Plan(
        title="test",
        source="test",
        run_dir=run_dir,
        resume=None,
        backend="test",
        launcher_name=kind.__name__.lower(),
        launcher=launcher,
        hosts=hosts,
        commands=launcher.plan(argv, hosts, ranks),
        max_restarts=max_restarts,
        log_dir=None,
        log_bytes=log_bytes,
        numbers={},
        on_cpu=True,
    )


class Result:
    """The result of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.shown, self.told = io.StringIO(), io.StringIO()
        self.code = -1


def alive_ranks(run_dir: Path) -> list[int]:
    """Processes whose command line names this run."""
    results = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            results.append(process.pid)
    return results


@pytest.fixture
def run_behaviour(tmp_path):
    """Runs a behaviour to its end in this process."""

    def run(
        behaviour: str,
        *,
        ranks: int = 1,
        max_restarts: int = 0,
        failure_s: float = 1.0,
        launcher_name: str = "torchrun",
        log_bytes: int | None = None,
    ) -> Result:
        result = Result(tmp_path)
        planned = partial(
            make_plan,
            tmp_path,
            behaviour,
            ranks=ranks,
            max_restarts=max_restarts,
            launcher_name=launcher_name,
            log_bytes=log_bytes,
        )
        plan = planned()
        hosts = ThisHost(
            display=Quiet(result.shown),
            environ=clean(caller()),
            replan=lambda checkpoint: planned(),
            limits=replace(QUICK, settle_s=failure_s, leftover_s=0.5),
            stream=result.told,
        )
        result.code = hosts.run(plan).code
        return result

    yield run
    assert alive_ranks(tmp_path) == [], "the starter left ranks behind"


@pytest.fixture
def starter(tmp_path):
    """Starts a behaviour under a starter of its own, which can be signalled; kills what is left at the end."""
    started = []

    def start(behaviour: str, *, ranks: int = 1, launcher_name: str = "torchrun") -> "subprocess.Popen[str]":
        script = textwrap.dedent(
            f"""
            import importlib.util, sys
            sys.path.insert(0, {str(ROOT)!r})
            from pathlib import Path
            from mtrain.jobs.hosts.this_host import ThisHost
            from mtrain.records.console import Quiet
            from mtrain.system.environment import caller, clean
            spec = importlib.util.spec_from_file_location("faults", {str(Path(__file__))!r})
            faults = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(faults)
            plan = faults.make_plan(Path({str(tmp_path)!r}), {behaviour!r}, ranks={ranks}, launcher_name={launcher_name!r})
            environ, replan = clean(caller()), lambda checkpoint: plan
            hosts = ThisHost(display=Quiet(sys.stdout), environ=environ, replan=replan, limits=faults.QUICK)
            sys.exit(hosts.run(plan).code)
            """
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        ready = [tmp_path / f"ready-{rank}" for rank in range(ranks)]
        wait_for(lambda: all(file.exists() for file in ready), process, timeout_s=180)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for pid in alive_ranks(tmp_path):
        os.kill(pid, signal.SIGKILL)


def wait_for(condition, process=None, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the starter ended: {process.communicate()}")
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for


@pytest.fixture(name="alive_ranks")
def alive_ranks_fixture(tmp_path):
    return lambda: alive_ranks(tmp_path)
