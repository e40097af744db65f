"""The devices of a job: asked for by number they are GPUs that must be there, and every page of a job names them."""

import json
import sys

import pytest

from mtrain.commands import main
from mtrain.system import placement

DIGITS = ("-c", "digits", "--backend", "solo", "--epochs", "1", "--name", "first")


@pytest.fixture(autouse=True)
def _in_an_empty_folder_without_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(monkeypatch, 0)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this machine have so many GPUs, as far as a plan can see."""
    monkeypatch.setattr(
        placement, "count_devices", lambda environ, **_: 0 if "CUDA_VISIBLE_DEVICES" in environ else count
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert "Traceback" not in stderr
    return stderr


def devices(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--json", "-c", "yolov5n", "-o", "train.batch_size=16", *words]) == 0
    return json.loads(capsys.readouterr().out)["numbers"]["devices"]


@pytest.mark.parametrize("words", [("plan",), ("train", "--dry-run"), ("train",)], ids=" ".join)
@pytest.mark.parametrize("flag", ["--devices", "--selected_gpu"])
def test_numbers_name_gpus_and_are_refused_where_there_are_none(capsys, tmp_path, words, flag):
    message = refused(capsys, words[0], *DIGITS, *words[1:], flag, "0,1")
    assert "cluster.devices: [0, 1] given, but no GPU was found on this host" in message
    assert "--devices cpu" in message
    assert not list(tmp_path.iterdir()), "nothing was started and nothing was made"


def test_a_number_beyond_the_gpus_that_are_there_is_refused(capsys, monkeypatch):
    gpus(monkeypatch, 2)
    assert "[0, 2] given, but this host has GPU 0 and 1" in refused(capsys, "plan", *DIGITS, "--devices", "0,2")


def test_gpus_that_the_environment_hides_are_said_to_be_hidden(capsys, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in refused(capsys, "plan", *DIGITS, "--devices", "0")


def test_the_word_cuda_is_refused_where_there_is_no_gpu(capsys):
    assert "backend.options.device: 'cuda' given, but no GPU was found" in refused(
        capsys, "plan", *DIGITS, "--devices", "cuda"
    )


@pytest.mark.parametrize("how", [("--devices", "0,0"), ("-o", "cluster.devices=[1, 0, 1]")])
def test_a_device_that_is_named_twice_is_refused(capsys, monkeypatch, how):
    gpus(monkeypatch, 2)
    assert "each once" in refused(capsys, "plan", *DIGITS, *how)


def test_a_plan_names_the_devices_of_this_host(capsys, monkeypatch):
    assert devices(capsys, "-b", "ddp") == "CPU: no GPU was found"
    assert devices(capsys, "-b", "ddp", "--devices", "cpu") == "CPU"
    gpus(monkeypatch, 4)
    assert devices(capsys, "-b", "ddp") == "GPU 0, 1, 2, 3"
    assert devices(capsys, "-b", "ddp", "--devices", "1,2") == "GPU 1, 2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices(capsys, "-b", "ddp") == "CPU: CUDA_VISIBLE_DEVICES hides all GPUs"


@pytest.mark.job
def test_a_plan_for_other_hosts_names_the_devices_that_are_asked_for(capsys):
    two = ("-b", "fleet", "--ips", "10.0.0.1,10.0.0.2")
    assert devices(capsys, *two, "--selected_gpu", "0,1") == "GPU 0, 1 of each host"
    assert devices(capsys, *two) == "the GPUs of each host, or its CPU"
    assert devices(capsys, *two, "--devices", "cpu") == "CPU"


# --------------------------------------------------------------------------------------------- what a backend cannot do
LIMITS = {
    "bf16 on the CPU under Paddle": (("-b", "fleet", "--amp"), "Paddle has no mixed precision on the CPU"),
    "the same for one process": (("-b", "solo", "-o", "backend.options.framework=paddle", "--amp=fp16"), "no mixed precision"),
    "Paddle's compiler": (("-b", "fleet", "-o", "train.compile=true"), "train.compile"),
    "a compiled model in parts": (
        ("-b", "deepspeed", "-o", "train.compile=true", "backend.options.stage=3"),
        "use stage 0, 1 or 2",
    ),
    "a static graph with accumulation": (
        ("-b", "ddp", "-o", "backend.options.static_graph=true", "train.accumulate=2"),
        "static_graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "reason"), LIMITS.values(), ids=LIMITS)
def test_what_a_backend_cannot_do_is_refused_by_the_plan(capsys, words, reason):
    assert reason in refused(capsys, "plan", "-c", "digits", *words)
    assert not {"torch", "paddle"} & {name for name in sys.modules if name == "paddle"}


def test_mixed_precision_is_planned_where_the_hosts_may_have_gpus(capsys):
    assert devices(capsys, "-b", "fleet", "--amp", "--ips", "10.0.0.1,10.0.0.2").startswith("the GPUs of each host")
