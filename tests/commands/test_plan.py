"""`mtrain plan` prints exactly what `mtrain train` runs, and starts nothing."""

import json
import shlex
import subprocess
import sys

import pytest

from mtrain.commands import main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "FLAGS_START_PORT"):
        monkeypatch.delenv(name, raising=False)


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", "-c", "yolov5n", *arguments]) == 0
    return capsys.readouterr().out


def plan_json(capsys, *arguments: str) -> dict:
    return json.loads(plan(capsys, "--json", *arguments))


def test_two_hosts_get_one_torchrun_command_each_that_differs_in_the_node_rank(capsys):
    two = ("--backend", "ddp", "--ips", "10.0.0.1,10.0.0.2", "--nproc-per-node", "2", "-o", "train.batch_size=16")
    first, second = plan_json(capsys, *two)["commands"]
    assert (first["host"], second["host"]) == ("10.0.0.1", "10.0.0.2")
    assert first["argv"][:3] == [sys.executable, "-m", "mtrain.backends._torch.ranks.starter"]
    assert first["argv"][3:] == [
        *("--nnodes=2", "--node-rank=0", "--nproc-per-node=2", "--master-addr=10.0.0.1", "--master-port=29500"),
        *("--max-restarts=0", "--first-rank=0", "--world-size=4", "--log-dir=runs/yolov5n/logs/torchrun"),
        *("-m", "mtrain.rank.worker", "--run-dir", "runs/yolov5n"),
    ]
    differing = {"--node-rank=1": "--node-rank=0", "--first-rank=2": "--first-rank=0"}
    assert [differing.get(word, word) for word in second["argv"]] == first["argv"]
    assert first["env"] == second["env"]
    assert "GLOO_SOCKET_IFNAME" not in first["env"], "the name of an interface on another host is not known here"


FLEET = ("--backend", "fleet", "--ips", "10.0.0.1,10.0.0.2", "-o", "train.batch_size=16")


def test_two_hosts_get_one_fleetrun_command_each_with_the_devices_that_were_selected(capsys):
    first, second = plan_json(capsys, *FLEET, "--selected_gpu", "0,1")["commands"]
    assert (first["host"], second["host"]) == ("10.0.0.1", "10.0.0.2")
    assert first["argv"] == [
        *(sys.executable, "-m", "mtrain.launchers.withheld", "keep"),
        *(sys.executable, "-m", "mtrain.backends.paddle_launch", "--master", "10.0.0.1:29500", "--nnodes", "2"),
        *("--rank", "0", "--host", "10.0.0.1", "--nproc_per_node", "2", "--devices", "0,1"),
        *("--run_mode", "collective", "--max_restart", "0", "--log_dir", "runs/yolov5n/logs/fleetrun-0"),
        *(sys.executable, "-m", "mtrain.launchers.withheld", "restore"),
        *(sys.executable, "-m", "mtrain.rank.worker", "--run-dir", "runs/yolov5n"),
    ]
    assert [pair for pair in zip(first["argv"], second["argv"], strict=True) if len(set(pair)) > 1] == [
        ("0", "1"),
        ("10.0.0.1", "10.0.0.2"),
        ("runs/yolov5n/logs/fleetrun-0", "runs/yolov5n/logs/fleetrun-1"),
    ]
    assert first["env"] == second["env"]
    assert first["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_first_port_comes_from_the_flag_then_from_the_environment_then_from_the_file(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.yml").write_text("_BASE_: yolov5n\ncluster: {start_port: 5000}\n")

    def port(*arguments: str) -> str:
        assert main(["plan", "--json", "-c", "mine.yml", *FLEET, "--nproc_per_node", "2", *arguments]) == 0
        argv = json.loads(capsys.readouterr().out)["commands"][0]["argv"]
        return argv[argv.index("--start_port") + 1]

    assert port() == "5000"
    monkeypatch.setenv("FLAGS_START_PORT", "6170")
    assert port() == "6170"
    assert port("--start-port", "7000") == "7000"


@pytest.mark.parametrize("hidden", [["--devices", "cpu"], []], ids=["asked for", "CUDA_VISIBLE_DEVICES is empty"])
def test_ranks_on_the_cpu_see_no_device(capsys, monkeypatch, hidden):
    if not hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for backend, expected in (("ddp", ""), ("fleet", "all")):
        (command,) = plan_json(capsys, "-b", backend, "--nproc-per-node", "2", "-o", "train.batch_size=16", *hidden)[
            "commands"
        ]
        assert command["env"]["CUDA_VISIBLE_DEVICES"] == expected
        assert "--devices" not in command["argv"]


def test_backend_python_is_what_agent_and_ranks_run(capsys):
    (command,) = plan_json(capsys, "-b", "fleet", "-o", "backend.python=/opt/paddle/bin/python")["commands"]
    assert command["argv"].count("/opt/paddle/bin/python") == 4
    assert sys.executable not in command["argv"]


def test_fleet_is_refused_on_a_machine_that_is_none_of_the_hosts(capsys, tmp_path):
    assert main(["-c", "yolov5n", "-b", "fleet", "--ips", "203.0.113.7,203.0.113.8", "--nproc-per-node", "1"]) == 2
    assert "this machine is not among them" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_host_meets_on_loopback_at_a_free_port(capsys):
    (command,) = plan_json(capsys, "-b", "ddp", "--nproc-per-node", "2", "-o", "train.batch_size=16")["commands"]
    assert "--master-addr=127.0.0.1" in command["argv"]
    port = next(word for word in command["argv"] if word.startswith("--master-port="))
    assert 1024 < int(port.partition("=")[2]) < 65536
    assert command["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert command["env"]["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_backend_without_rendezvous_is_started_directly(capsys):
    planned = plan_json(capsys, "-b", "solo", "--name", "mine")
    assert planned["launcher"] == "local"
    assert planned["commands"][0]["argv"] == [sys.executable, "-m", "mtrain.rank.worker", "--run-dir", "runs/mine"]


def test_the_global_batch_is_shared_out_and_printed(capsys):
    text = plan(capsys, "-b", "ddp", "--nproc-per-node", "2", "-o", "train.batch_size=16", "train.max_micro_batch=4")
    assert "16 = 2 ranks x 4 (micro batch) x 2 (accumulate)" in text


def test_scaled_rates_are_printed(capsys):
    scaling = (
        "train.batch_size=32",
        "train.reference_batch_size=64",
        "train.learning_rate_scaling=linear",
        "optimizer.learning_rate=0.02",
    )
    assert "learning rate      0.01 (linear: 0.02 x 0.5)" in plan(capsys, "-b", "solo", "-o", *scaling)


def test_the_printed_command_is_the_one_that_is_run(capsys):
    options = ("-b", "ddp", "-o", "cluster.master_port=31000", "report.dir=my runs")
    printed = plan(capsys, *options).splitlines()
    (command,) = plan_json(capsys, *options)["commands"]
    assert shlex.split(printed[-1]) == command["argv"]
    assert "'my runs/yolov5n'" in printed[-1]
    variables = dict(word.split("=", 1) for word in shlex.split(printed[-2].removesuffix("\\")))
    assert variables == command["env"]


def test_the_dry_run_of_train_is_the_plan_and_makes_no_folder(capsys, tmp_path):
    options = ("-b", "ddp", "-o", "cluster.master_port=31000")
    expected = plan(capsys, *options)
    assert main(["-c", "yolov5n", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == expected
    assert not list(tmp_path.iterdir())


def test_a_taken_name_gets_a_number(capsys, tmp_path):
    (tmp_path / "runs" / "yolov5n").mkdir(parents=True)
    assert plan_json(capsys)["run_dir"] == "runs/yolov5n-2"


def test_two_backends_can_be_compared(capsys):
    text = plan(capsys, "--diff", "ddp", "solo")
    assert text.startswith("--- ddp\n+++ solo\n")
    assert any(line.startswith("-") and "mtrain.backends._torch.ranks.starter" in line for line in text.splitlines())
    assert not any(line.startswith(("-", "+")) and "rate  " in line for line in text.splitlines())


def test_the_lines_to_type_on_each_host_of_two_backends_are_those_of_training(capsys, monkeypatch):
    hosts = ("--cluster", "manual", "--ips", "10.0.0.1,10.0.0.2", "-o", "train.batch_size=16")
    monkeypatch.setattr(sys, "argv", ["mtrain", "plan", "-c", "yolov5n", "--diff", "ddp", "horovod", *hosts])
    lines = plan(capsys, "--diff", "ddp", "horovod", *hosts).splitlines()
    assert lines.count("-    --backend ddp") == lines.count("+    --backend horovod") == 2, "one for each host"
    assert not any("--diff" in line for line in lines)


def test_a_batch_that_does_not_divide_is_refused_with_a_remedy(capsys):
    assert main(["plan", "-c", "yolov5n", "-b", "ddp", "--nproc-per-node", "3", "-o", "train.batch_size=16"]) == 2
    assert "train.batch_size: 16 does not divide among 3 ranks; use 15 or 18" in capsys.readouterr().err


def test_two_ranks_typed_for_a_backend_of_one_process_are_refused(capsys):
    assert main(["plan", "-c", "yolov5n", "-b", "solo", "--nproc-per-node", "2"]) == 2
    assert "this backend trains in one process" in capsys.readouterr().err


def test_a_spec_for_two_ranks_runs_on_a_backend_of_one_process(capsys, tmp_path):
    (tmp_path / "mine.yml").write_text("_BASE_: yolov5n\ncluster: {nproc_per_node: 2}\nbackend: {name: ddp}\n")
    assert main(["plan", "-c", "mine.yml", "-b", "solo"]) == 0
    assert "1 (1 host x 1)" in capsys.readouterr().out


def test_nothing_to_resume_from_is_refused_before_anything_starts(capsys):
    assert main(["plan", "-c", "yolov5n", "--resume"]) == 2
    assert "no intact checkpoint in runs/yolov5n (no such run)" in capsys.readouterr().err


def test_training_is_refused_on_a_machine_that_is_none_of_the_hosts(capsys, tmp_path):
    assert main(["-c", "yolov5n", "--ips", "203.0.113.7,203.0.113.8", "--nproc-per-node", "1"]) == 2
    stderr = capsys.readouterr().err
    assert "this machine is not among them; its addresses are" in stderr
    assert "127.0.0.1 (lo)" in stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
@pytest.mark.job
def test_planning_loads_no_framework():
    code = (
        "import sys; from mtrain.commands import main; assert main(['plan', '-c', 'yolov5n']) == 0;"
        "bad = {'torch', 'paddle', 'cv2', 'matplotlib', 'rich'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ------------------------------------------------------------------------------------------------- brought to other hosts
SSH = ("--backend", "ddp", "--cluster", "ssh", "-o", "train.batch_size=12")


def test_ssh_brings_an_agent_to_each_host_and_nothing_of_the_spec_into_a_command_line(capsys):
    flags = ("--ips", "10.0.0.1,10.0.0.2", "--ssh-port", "2222", "--ssh-identity-file", "my key", "--name", "$(reboot)")
    actual = plan_json(capsys, *SSH, *flags)
    assert (actual["cluster"], actual["launcher"]) == ("ssh", "torchrun")
    argv = actual["brought"][1]
    assert (argv[0], argv[-2]) == ("ssh", "10.0.0.2")
    assert argv[-1] == f"exec {shlex.quote(sys.executable)} -m mtrain.jobs.hosts.agent"
    assert [argv[argv.index(flag) + 1] for flag in ("-p", "-i")] == ["2222", "my key"]
    assert "BatchMode=yes" in argv
    assert not any("reboot" in word for argv in actual["brought"] for word in argv)
    text = plan(capsys, *SSH, *flags)
    assert "ddp, started by torchrun on each host, brought there by ssh" in text


@pytest.mark.parametrize("host", ["-oProxyCommand=reboot", "a b", "a;reboot", "$(reboot)", "a\nb"])
def test_what_is_no_host_never_reaches_ssh(capsys, host):
    assert main(["plan", "-c", "yolov5n", *SSH, "-o", f"cluster.ips=[{json.dumps(host)}, '10.0.0.2']"]) == 2
    assert "host " in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--ips=10.0.0.1:2,10.0.0.2:4", "-H10.0.0.1:2,10.0.0.2:4", "--hostfile=hosts"])
def test_hosts_may_have_other_numbers_of_ranks(capsys, tmp_path, how):
    (tmp_path / "hosts").write_text("10.0.0.1 slots=2  # the old one\n\n10.0.0.2 slots=4\n")
    actual = plan_json(capsys, *SSH, how)
    assert actual["numbers"]["ranks"] == "6 (2 hosts: 2 + 4)"
    ranks = [word for command in actual["commands"] for word in command["argv"] if word.startswith("--nproc")]
    assert ranks == ["--nproc-per-node=2", "--nproc-per-node=4"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ips", "10.0.0.1:2,10.0.0.2"), "give the number of ranks of every host, or of none"),
        (("--ips", "10.0.0.1,10.0.0.1"), "cluster.ips: 10.0.0.1 given twice"),
        (("--ips", "::1,::1"), "cluster.ips: ::1 given twice; name each host once, with its ranks: [::1]:2"),
        (("-o", "cluster.ips=[10.0.0.1]", "cluster.slots=[1, 2]"), "2 numbers given for 1 hosts"),
        ((), "cluster.name: 'ssh' given, but no host is named"),
    ],
)
def test_hosts_that_make_no_job_are_refused(capsys, flags, message):
    assert main(["plan", "-c", "yolov5n", *SSH, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.smoke
@pytest.mark.job
def test_manual_prints_the_line_for_each_host_and_starts_nothing(tmp_path):
    arguments = [*("-c", "digits", "--backend", "ddp", "--ips", "10.0.0.1,10.0.0.2"), "--cluster=manual"]
    process = subprocess.run(
        [sys.executable, "-m", "mtrain", *arguments, "--name", "it's mine"], capture_output=True, text=True, check=True
    )
    lines = process.stdout.splitlines()
    assert lines[0::2] == ["# 10.0.0.1", "# 10.0.0.2"]
    for node, line in enumerate(lines[1::2]):
        assert shlex.split(line) == [
            *(sys.executable, "-m", "mtrain", *arguments[:-1], "--name", "it's mine"),
            *("--cluster", "auto", "--node-rank", str(node)),
        ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.job
@pytest.mark.parametrize("words", [("plan",), ("train", "--dry-run"), ("train", "--dry_run")])
def test_a_plan_of_manual_shows_the_line_that_trains(words):
    arguments = ["-c", "digits", "--backend", "ddp", "--ips", "10.0.0.1,10.0.0.2"]
    argv = [sys.executable, "-m", "mtrain", words[0], *arguments, *words[1:], "--cluster", "manual"]
    process = subprocess.run(argv, capture_output=True, text=True, check=True)
    start = [sys.executable, "-m", "mtrain", "train", *arguments, "--cluster", "auto", "--node-rank"]
    assert [line.strip() for line in process.stdout.splitlines() if "--node-rank " in line] == [
        shlex.join([*start, str(node)]) for node in range(2)
    ]


def test_a_launcher_that_cannot_be_imported_is_in_the_way_of_no_other(tmp_path, capsys):
    (tmp_path / "gone.toml").write_text('[launchers.aaa]\nmodule = "no.such.module:Starter"\n')
    arguments = ["plan", "-c", "digits", "--backend", "ddp", "-o", f"plugins={tmp_path / 'gone.toml'}"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launcher"] == "torchrun"
    (tmp_path / "gone.toml").write_text(
        '[launchers]\ndisabled = ["torchrun", "deepspeed"]\n[launchers.aaa]\nmodule = "no.such.module:Starter"\n'
    )
    assert main(arguments) == 2
    stderr = capsys.readouterr().err
    assert "needs a launcher that provides 'torch'" in stderr
    assert "no.such.module" in stderr
    assert main([*arguments, "--launcher", "aaa"]) == 2
