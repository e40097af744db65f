"""Jobs through Paddle's own starter: its commands, and ranks that end, fail, hang, are killed and are asked to end."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from mtrain.core.interfaces import Host
from mtrain.errors import SpecError
from mtrain.launchers.fleetrun import Fleetrun
from mtrain.system.placement import free_port

WORKER = ("-m", "mtrain.rank.worker", "--run-dir", "/runs/a b")
TWO = [Host(address="10.0.0.1", slots=2), Host(address="10.0.0.2", slots=2)]
needs_paddle = pytest.mark.skipif(find_spec("paddle") is None, reason="Paddle is not installed")
through_fleetrun = {"ranks": 2, "launcher_name": "fleetrun"}


# ------------------------------------------------------------------------------------------------------- its commands
def launcher(**options: object) -> Fleetrun:
    return Fleetrun(Fleetrun.Options(python="/opt/python", **options))


def test_every_flag_is_given_and_nothing_is_left_to_the_name_of_the_host():
    first, second = launcher(master_addr="10.0.0.1", master_port=31000, devices=(2, 3)).plan(WORKER, TWO, 2)
    assert list(first.argv) == [
        *("/opt/python", "-m", "mtrain.launchers.withheld", "keep"),
        *("/opt/python", "-m", "mtrain.backends.paddle_launch", "--master", "10.0.0.1:31000", "--nnodes", "2"),
        *("--rank", "0", "--host", "10.0.0.1", "--nproc_per_node", "2", "--devices", "2,3"),
        *("--run_mode", "collective", "--max_restart", "0", "--log_dir", "/runs/a b/logs/fleetrun-0"),
        *("/opt/python", "-m", "mtrain.launchers.withheld", "restore", "/opt/python", *WORKER),
    ]
    differing = [pair for pair in zip(first.argv, second.argv, strict=True) if len(set(pair)) > 1]
    logs = [f"/runs/a b/logs/fleetrun-{node}" for node in (0, 1)]
    assert differing == [("0", "1"), ("10.0.0.1", "10.0.0.2"), tuple(logs)], (
        "where hosts share a folder, theirs are apart"
    )
    # Paddle counts --devices among those that this variable lists.
    assert first.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_hosts_with_other_numbers_of_ranks_are_refused():
    with pytest.raises(SpecError, match=r"cluster\.slots: \[2, 4\] given, and Paddle's launcher starts as many"):
        launcher(master_addr="10.0.0.1").plan(WORKER, [TWO[0], Host(address="10.0.0.2", slots=4)], 4)


def test_agents_of_several_hosts_meet_without_the_callers_proxy():
    first, _ = launcher(master_addr="10.0.0.9").plan(WORKER, TWO, 2)
    assert first.env["no_proxy"] == "10.0.0.9,10.0.0.1,10.0.0.2"
    (alone,) = launcher().plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)
    assert "no_proxy" not in alone.env


def test_the_first_port_is_given_in_the_way_that_this_form_of_the_launcher_obeys():
    (command,) = launcher(start_port=6170).plan(WORKER, [Host(address="127.0.0.1", slots=3)], 3)
    assert "--start_port 6170" in " ".join(command.argv)
    assert command.env["PORT_RANGE"] == "6170:6173"
    first, _ = launcher(master_addr="10.0.0.9").plan(WORKER, TWO, 2)
    assert "PORT_RANGE" not in first.env


def test_ranks_of_one_host_listen_where_no_outgoing_connection_comes_first():
    (command,) = launcher().plan(WORKER, [Host(address="127.0.0.1", slots=3)], 3)
    assert command.env["PORT_RANGE"] == "20000:32767"


def test_a_first_port_that_leaves_no_room_is_refused():
    with pytest.raises(SpecError, match=r"65535 given; 2 ranks .* up to 65537, .* give 65533 or less"):
        launcher(start_port=65535).plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)
    assert launcher(start_port=65533).plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)


def test_ranks_on_the_cpu_get_no_devices():
    (command,) = launcher(devices=()).plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)
    assert "--devices" not in command.argv
    assert command.env["CUDA_VISIBLE_DEVICES"] == "all", "an empty one is a device to Paddle"


@pytest.mark.parametrize("address", ["fe80::1", "::1"])
def test_a_host_that_paddle_would_mistake_is_refused(address):
    with pytest.raises(SpecError, match=f"cluster.ips: '{address}' given, .* give its IPv4 address"):
        launcher(master_addr="10.0.0.1").plan(WORKER, [TWO[0], Host(address=address)], 1)


def test_fewer_devices_than_ranks_are_refused():
    with pytest.raises(SpecError, match=r"cluster.devices: \[0\] given for 2 ranks"):
        launcher(devices=(0,)).plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)


def test_the_failed_rank_is_read_from_what_paddle_prints_and_counted_over_all_hosts():
    log = (
        "LAUNCH INFO 2026-01-02 03:04:05,678 nproc_per_node: 2\n"
        "LAUNCH INFO 2026-01-02 03:04:05,678 rank: 1\n"
        "LAUNCH ERROR 2026-01-02 03:04:06,789 Container failed !!!\n"
        "Container rank 1 status failed cmd ['/opt/python', '-m', 'mtrain.rank.worker'] code -9 log /runs/a/workerlog.1\n"
    )
    assert launcher().deaths(log, 1) == [(3, -9)]
    assert launcher().deaths(log.replace("rank: 1", "rank: 0"), 1) == [(1, -9)]
    assert launcher().deaths("", 1) == []


# ------------------------------------------------------------------------------------------------------- real processes
@pytest.mark.smoke
@pytest.mark.job
@needs_paddle
def test_two_ranks_that_end_well_give_0(run_behaviour, tmp_path):
    assert run_behaviour("succeed", **through_fleetrun).code == 0
    assert (tmp_path / "logs" / "fleetrun" / "workerlog.1").exists()


@pytest.mark.job
@needs_paddle
def test_paddles_own_restarts_are_off_and_ours_are_made(run_behaviour, tmp_path):
    result = run_behaviour("fail_the_first_time", max_restarts=1, **through_fleetrun)
    assert result.code == 0
    assert len(list((tmp_path / "failures").glob("earlier-*"))) == 1
    assert (tmp_path / "logs" / "starter.log").read_text().count("Run Pod") == 2


@pytest.mark.job
@needs_paddle
def test_stale_variables_of_the_shell_reach_neither_the_agent_nor_a_rank(run_behaviour, tmp_path, monkeypatch):
    stale = {
        "PADDLE_START_PORT": "7",
        "PADDLE_NNODES": "5",
        "PADDLE_MAX_RESTART": "9",
        "PADDLE_MASTER": "203.0.113.1:7",
        "PADDLE_ELASTIC_LEVEL": "1",
        "POD_IP": "203.0.113.1",
        "FLAGS_START_PORT": "7",
        "PORT_RANGE": "7:8",
        "DISTRIBUTED_TRAINER_ENDPOINTS": "203.0.113.1:7,203.0.113.2:7",
    }
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    assert run_behaviour("show_environment", **through_fleetrun).code == 0
    records = dict(
        line.split("=", 1) for line in (tmp_path / "environment.txt").read_text().splitlines() if "=" in line
    )
    assert not {name for name, value in stale.items() if records.get(name) == value}
    assert (records["PADDLE_TRAINERS_NUM"], records["PADDLE_NNODES"]) == ("2", "1")


@pytest.mark.job
@needs_paddle
def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(starter, tmp_path, alive_ranks, wait_for):
    process = starter("ignore_requests", **through_fleetrun)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all((tmp_path / f"heard-{rank}").exists() for rank in range(2)))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert alive_ranks() == []


def started_by(module: str, folder: Path) -> dict[str, dict[str, str]]:
    """Return the variables of each of two ranks that Paddle's launcher starts, with what its process has loaded as LOADED."""
    program = folder / "rank.py"
    program.write_text(
        "import json, os\n"
        "loaded = str('libpaddle' in open(f'/proc/{os.getppid()}/maps').read())\n"
        "print(json.dumps({**os.environ, 'LOADED': loaded}))\n"
    )
    words = ["--master", f"127.0.0.1:{free_port()}", "--nnodes", "1", "--rank", "0", "--host", "127.0.0.1"]
    words += ["--nproc_per_node", "2", "--run_mode", "collective", "--log_dir", str(folder / module)]
    command = [sys.executable, "-m", module, *words, sys.executable, str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = [json.loads((folder / module / f"workerlog.{rank}").read_text().splitlines()[-1]) for rank in (0, 1)]
    return {row["PADDLE_TRAINER_ID"]: row for row in rows}


DRAWN = {"POD_NAME", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"}
"""Variables of ranks that differ in each start."""
OF_IMPORTS = {"CUSTOM_DEVICE_ROOT", "LD_LIBRARY_PATH"}
"""Variables that importing Paddle sets, in a rank too."""


@pytest.mark.job
@needs_paddle
def test_paddles_launcher_gives_ranks_the_same_variables_without_loading_paddle(tmp_path):
    ours, theirs = (
        started_by(module, tmp_path) for module in ("mtrain.backends.paddle_launch", "paddle.distributed.launch")
    )
    assert {row.pop("LOADED") for row in ours.values()} == {"False"}
    assert {row.pop("LOADED") for row in theirs.values()} == {"True"}
    assert ours.keys() == theirs.keys() == {"0", "1"}
    for rank in ours:
        names = {
            name for name in ours[rank].keys() | theirs[rank].keys() if ours[rank].get(name) != theirs[rank].get(name)
        }
        folders = {"PADDLE_LOG_DIR", "PADDLE_BACKUP_ENV_PATH"}
        assert names <= DRAWN | OF_IMPORTS | folders
        assert ours[rank].keys() >= DRAWN


@pytest.mark.job
@needs_paddle
def test_an_agent_that_is_killed_leaves_no_ranks(starter, alive_ranks):
    process = starter("ignore_requests", **through_fleetrun)
    agents = [c for c in psutil.Process(process.pid).children() if "mtrain.backends.paddle_launch" in c.cmdline()]
    os.kill(agents[0].pid, signal.SIGKILL)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the starter of the ranks was ended by signal 9 (SIGKILL)" in message
    assert alive_ranks() == []
