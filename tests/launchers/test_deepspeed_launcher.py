"""Jobs through DeepSpeed's own launcher: its commands, and ranks that end, fail, hang, are killed and are asked to end."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from mtrain.backends._deepspeed import starter as host
from mtrain.commands import main
from mtrain.core.interfaces import Host
from mtrain.launchers.deepspeed import DeepSpeedLauncher
from mtrain.system.placement import line_for

WORKER = ("-m", "mtrain.rank.worker", "--run-dir", "/runs/a b")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
through_deepspeed = {"ranks": 2, "launcher_name": "deepspeed"}


# ------------------------------------------------------------------------------------------------------- its commands
def launcher(**options: object) -> DeepSpeedLauncher:
    return DeepSpeedLauncher(DeepSpeedLauncher.Options(python="/opt/python", **options))


def test_each_host_is_told_all_hosts_and_they_differ_in_their_place_alone():
    hosts = [Host(address="10.0.0.1", slots=2), Host(address="10.0.0.2", slots=4)]
    first, second = launcher(master_addr="10.0.0.1", master_port=31000, devices=(2, 3)).plan(WORKER, hosts, 4)
    assert list(first.argv) == [
        *("/opt/python", "-m", "mtrain.backends._deepspeed.starter", "--hostfile=/runs/a b/hostfile"),
        *("--host=10.0.0.1 slots=2", "--host=10.0.0.2 slots=4", "--node-rank=0"),
        *("--master-addr=10.0.0.1", "--master-port=31000", "--", "/opt/python", *WORKER),
    ]
    assert [pair for pair in zip(first.argv, second.argv, strict=True) if len(set(pair)) > 1] == [
        ("--node-rank=0", "--node-rank=1")
    ]
    assert (first.host, second.host) == ("10.0.0.1", "10.0.0.2")
    assert first.env == second.env
    assert first.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_failed_ranks_are_read_from_what_their_shells_say():
    log = (
        "[2026-01-02 03:04:05,678] [INFO] [launch.py:245:main] process 7 spawned with command: ['sh', '-c', ...]\n"
        'rank ended: {"rank": 3, "status": 137}\n'
        'rank ended: {"rank": 1, "status": 143}\n'
        'rank ended: {"rank": 10, "status": 1}\n'
        'rank ended: {"rank": 2, "status": 255}\n'
    )
    assert launcher().deaths(log, 1) == [(1, -signal.SIGTERM), (2, 255), (3, -signal.SIGKILL), (10, 1)]
    assert launcher().deaths("", 1) == []


def test_it_is_taken_by_itself_only_where_nothing_else_is_there(tmp_path, capsys):
    (tmp_path / "plugins.toml").write_text('[launchers]\ndisabled = ["torchrun"]\n')
    arguments = ["plan", "-c", "digits", "--backend", "deepspeed", "--nproc-per-node", "2", "--json"]
    chosen = []
    for more in ([], ["--launcher", "deepspeed"], ["-o", f"plugins={tmp_path / 'plugins.toml'}"]):
        assert main([*arguments, *more]) == 0
        chosen.append(json.loads(capsys.readouterr().out)["launcher"])
    assert chosen == ["torchrun", "deepspeed", "deepspeed"]


def test_every_host_of_a_job_by_hand_is_told_the_same_launcher():
    typed = ["mtrain", "-c", "x", "--launcher", "deepspeed", "--node-rank=0"]
    assert line_for(typed, 1) == [*typed[:-1], "--node-rank", "1"]
    assert line_for(typed, 1, cluster="manual") == [*typed[:-1], "--cluster", "auto", "--node-rank", "1"]


def test_an_interpreter_without_deepspeed_is_told_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (command,) = launcher().plan(("--run-dir", str(tmp_path)), [Host(address="127.0.0.1", slots=2)], 2)
    assert host.main(command.argv[3:]) == 2
    assert "has no DeepSpeed; install it with: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- real processes
@pytest.mark.job
@needs_deepspeed
def test_ranks_get_the_devices_of_the_plan_and_nothing_stale(run_behaviour, tmp_path, monkeypatch):
    """DeepSpeed's launcher gives them the numbers of its slots."""
    stale = {
        "DS_ENV_FILE": "x",
        "MASTER_ADDR": "203.0.113.1",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "7",
        "MTRAIN_VISIBLE_DEVICES": "5",
    }
    for name, value in {**stale, "CUDA_VISIBLE_DEVICES": "6,4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("MASTER_PORT=7\n")
    assert run_behaviour("show_environment", **through_deepspeed).code == 0
    records = dict(
        line.split("=", 1) for line in (tmp_path / "environment.txt").read_text().splitlines() if "=" in line
    )
    assert not {name for name, value in stale.items() if records.get(name) == value}
    assert records["CUDA_VISIBLE_DEVICES"] == "6,4"
    assert (records["WORLD_SIZE"], records["MASTER_ADDR"]) == ("2", "127.0.0.1")
    assert "DS_ACCELERATOR" not in records
    assert (tmp_path / "hostfile").read_text() == "127.0.0.1 slots=2\n"


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("deepspeed.launcher.launch", "DeepSpeed's launcher was killed; its ranks were ended"),
        ("deepspeed.launcher.runner", "DeepSpeed's launcher was ended by signal 9; its ranks were ended"),
        ("mtrain.backends._deepspeed.starter", "the starter of the ranks was ended by signal 9 (SIGKILL)"),
    ],
    ids=["its inner process", "its outer process", "our agent"],
)
def test_a_launcher_that_is_killed_is_a_failure_and_leaves_no_ranks(starter, alive_ranks, module, reason):
    """Its outer process says that all went well when the inner one was killed."""
    process = starter("ignore_requests", **through_deepspeed)
    actual = psutil.Process(process.pid).children(recursive=True)
    next(one for one in actual if module in one.cmdline()[:4]).kill()
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert reason in message
    assert alive_ranks() == []


# --------------------------------------------------------------------------------------------------------- real training
def train(folder, name: str, *, launcher: str, updates: int, backend: str = "deepspeed") -> "subprocess.Popen[str]":
    values = {
        "train.epochs": "null",
        "train.updates": updates,
        "evaluate.every_epochs": "null",
        "evaluate.at_end": "false",
        "report.dir": folder,
        "report.plots": "false",
        "report.tensorboard": "false",
    }
    pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    place = ["--backend", backend, "--launcher", launcher, "--nproc-per-node", "2", "--name", name]
    return subprocess.Popen(
        [sys.executable, "-m", "mtrain", "train", "-c", "vit_digits", *place, *pairs],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@needs_deepspeed
@pytest.mark.slow
def test_a_job_ends_with_the_weights_of_the_job_that_torchrun_starts_whichever_the_backend(tmp_path):
    results = set()
    for backend, name in (("deepspeed", "torchrun"), ("deepspeed", "deepspeed"), ("ddp", "deepspeed")):
        process = train(tmp_path, f"{backend}-{name}", backend=backend, launcher=name, updates=3)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        summary = json.loads((tmp_path / f"{backend}-{name}" / "summary.json").read_text())
        results.add((summary["weights_sha256"], summary["ema_sha256"]))
    assert len(results) == 1


@needs_deepspeed
@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path, wait_for):
    process = train(tmp_path, "killed", launcher="deepspeed", updates=100_000)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"update": 1,' in metrics.read_text(), process, timeout_s=180)
    everybody = psutil.Process(process.pid).children(recursive=True)
    workers = [one for one in everybody if one.cmdline()[1:3] == ["-m", "mtrain.rank.worker"]]
    next(one for one in workers if one.environ()["RANK"] == "1").kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: rank 1 was ended by signal 9 (SIGKILL)" in output
    assert f"last lines of {tmp_path}/killed/logs/" in output
    assert 'rank ended: {"rank": 1, "status": 137}' in (tmp_path / "killed" / "logs" / "starter.log").read_text()
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert alive == []
