"""Jobs that train adapters through the real command line: a plain loop's losses on any ranks, checkpoints, peft's files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from tests.language import adapter_jobs
from tests.language.adapter_jobs import ADAPTERS, arrays_of, plain_loop

from mtrain.core.checkpoint.format import MANIFEST
from tests.own_model.runs import QUIET, command, losses, refused, trained
from tests.starts import starts_processes

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
DDP = ("--backend", "ddp", "--nproc-per-node", "2", "-o", "train.accumulate=3")


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory) -> Path:
    """A folder with a base, texts and a spec, where ``two`` was trained by ddp on two ranks in three micro batches."""
    here = adapter_jobs.write(tmp_path_factory.mktemp("adapters"))
    trained(here, "two", here / "lora.yml", *DDP)
    return here


@pytest.fixture(scope="module")
def plain(folder) -> tuple[list[float], dict[str, torch.Tensor]]:
    return plain_loop(folder)


def check_is_the_plain_loop(folder: Path, name: str, plain) -> None:
    """Compare losses and averages with those of the plain loop, and look what the checkpoint holds."""
    expected_losses, expected_average = plain
    found = losses(folder, name)
    loss_difference = max(abs(a - b) for a, b in zip(expected_losses, found, strict=True))
    average = arrays_of(folder, name, "ema")
    assert set(average) == set(arrays_of(folder, name, "weights")) == set(expected_average) == ADAPTERS
    moments = set(arrays_of(folder, name, "optimizer"))
    assert moments == {f"{moment}/{name}" for moment in ("mean", "square") for name in ADAPTERS}
    average_difference = max(float((average[key] - x).abs().max()) for key, x in expected_average.items())
    print(f"{name}: losses {loss_difference:.1e}, averages {average_difference:.1e}")
    assert loss_difference <= 1e-12
    assert average_difference <= 1e-12


def test_two_ranks_train_the_adapters_of_a_plain_loop_of_peft(folder, plain):
    check_is_the_plain_loop(folder, "two", plain)
    lines = (folder / "runs/two/metrics.jsonl").read_text().splitlines()
    updates = [record for line in lines if (record := json.loads(line)).get("kind") == "update"]
    assert updates[-1]["tokens_per_second"] == 24 * updates[-1]["samples_per_second"]


FSDP = ["--backend", "fsdp", *DDP[2:]]
TENSOR = "parallel={tensor: 2, plan: {transformer.h.*.mlp.c_fc: colwise, transformer.h.*.mlp.c_proj: rowwise}}"


def test_so_do_ranks_that_share_the_adapted_layers(folder, plain):
    trained(folder, "tensor", folder / "lora.yml", *FSDP, "-o", TENSOR)
    check_is_the_plain_loop(folder, "tensor", plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one", ["--backend", "solo"]),
        ("fsdp", FSDP),
        ("parts", ["--backend", "solo", "-o", "train.accumulate=4", "-o", "train.recompute=true"]),
        ("hvd", ["--backend", "horovod", "--nproc-per-node", "2"]),
        *(
            (
                f"zero{stage}",
                ["--backend", "deepspeed", "-o", f"backend.options.stage={stage}", *DDP[2:]],
            )
            for stage in (1, 2, 3)
        ),
    ],
)
def test_so_does_every_backend(folder, plain, name, words):
    trained(folder, name, folder / "lora.yml", *words)
    check_is_the_plain_loop(folder, name, plain)


def test_a_job_goes_on_from_adapters_with_the_same_bits_and_on_their_own_base_alone(folder):
    whole = json.loads((folder / "runs/two/summary.json").read_text())
    shutil.copytree(folder / "runs/two", folder / "runs/again")
    shutil.rmtree(folder / "runs/again/checkpoints/step-00000008")
    shutil.move(folder / "base", folder / "true-base")
    adapter_jobs.write_base(folder / "base", seed=2)
    told = refused(folder, "train", "--resume", "runs/again", *QUIET)
    assert "base holds other weights" in told
    shutil.rmtree(folder / "base")
    adapter_jobs.write_base(folder / "base", seed=1, max_shard_size="20KB")  # the same weights in other files
    assert len(list((folder / "base").glob("*.safetensors"))) > 1
    result = command(folder, "train", "--resume", "runs/again", *QUIET)
    assert result.returncode == 0, result.stdout + result.stderr
    again = json.loads((folder / "runs/again/summary.json").read_text())
    assert again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [DDP, ("--backend", "deepspeed", "-o", "backend.options.stage=3", *DDP[2:])])
def test_a_job_that_was_killed_ends_with_the_same_bits(folder, words):
    name, long = f"killed-{words[1]}", ("-o", "train.updates=80")
    whole = trained(folder, f"whole-{words[1]}", folder / "lora.yml", *words, *long)
    line = [sys.executable, "-m", "mtrain", "train", "-c", "lora.yml", "--name", name, *QUIET, *words, *long]
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        checkpoints, until = folder / f"runs/{name}/checkpoints", time.monotonic() + 200
        while len(list(checkpoints.glob(f"step-*/{MANIFEST}"))) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        own = [process, *psutil.Process(process.pid).children(recursive=True)]
        for each in own:
            each.kill()  # its ranks first would be a failure, which it restarts or tells
        assert process.wait() == -signal.SIGKILL, "the job had ended before"
    result = command(folder, "train", "--resume", f"runs/{name}", *QUIET)
    assert result.returncode == 0, result.stdout + result.stderr
    starts = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    starts = [record for record in starts if record["kind"] == "start"]
    assert [record["resumed_from"] is None for record in starts] == [True, False]
    again = json.loads((folder / f"runs/{name}/summary.json").read_text())
    assert (again["weights_sha256"], again["ema_sha256"]) == (whole["weights_sha256"], whole["ema_sha256"])


def test_peft_reads_the_adapters_and_transformers_the_merged_model(folder, plain):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for to, flags in (("adapters", []), ("merged", ["--merge"])):
        result = command(folder, "weights", "export", "runs/two", "--to", to, *flags)
        assert result.returncode == 0, result.stdout + result.stderr
    assert {file.name for file in (folder / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (folder / "adapters/model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "base").double()
    tokens = torch.tensor([[*b"1 and ii make "]])
    with torch.no_grad():
        plain_logits = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapters").double()
        assert not [name for name, x in adapted.named_parameters() if "lora_" in name and not x.any()]
        for name, x in adapted.named_parameters():
            if "lora_" in name:
                x.copy_(plain[1][name.removeprefix("base_model.model.")])
        expected = adapted(tokens).logits
        assert float((expected - plain_logits).abs().max()) > 1e-2
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapters")
        difference = float((loaded(tokens).logits - expected).abs().max())
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
        merged_difference = float((merged(tokens).logits - expected).abs().max())
    print(f"adapters {difference:.1e}, merged {merged_difference:.1e}")
    assert difference < 1e-5
    assert merged_difference < 1e-5


@pytest.mark.slow
def test_evaluate_and_predict_take_the_adapters_and_their_own_base_alone(folder):
    result = command(folder, "evaluate", "runs/two")
    assert result.returncode == 0, result.stdout + result.stderr
    best = json.loads((folder / "runs/two/summary.json").read_text())["best"]
    metrics = json.loads((folder / "runs/two-evaluate/summary.json").read_text())["metrics"]
    assert metrics == {name: best[name] for name in metrics}
    (folder / "sum.txt").write_text("1 and ii make ")
    result = command(folder, "predict", "sum.txt", "--run", "runs/two", "--out", "out")
    assert result.returncode == 0, result.stdout + result.stderr
    adapter_jobs.write_base(folder / "other", seed=2)
    for words in (
        ["evaluate", "runs/two", "--name", "other"],
        ["predict", "sum.txt", "--run", "runs/two", "--out", "no"],
    ):
        told = refused(folder, *words, "-o", "model.options.path=other")
        assert "other holds other weights" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "model.options.lora={rank: 0}"], "rank"),
        (["-o", "model.options.lora={targets: [q_proj]}"], "no layer is called q_proj"),
        (["-o", "model.options.from_scratch=true"], "lora given with from_scratch"),
        (["-o", "model.options.path=lora.yml"], "no weights"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(folder, words, said):
    assert said in refused(folder, "train", "-c", "lora.yml", "--name", f"no-{os.getpid()}", *words)


@pytest.mark.slow
def test_a_whole_model_has_nothing_to_merge_and_no_adapters_to_go_on_with(folder):
    trained(
        folder,
        "whole",
        folder / "lora.yml",
        "--backend",
        "solo",
        "-o",
        "model.options.lora=null",
        "-o",
        "train.updates=1",
    )
    told = refused(folder, "weights", "export", "runs/whole", "--to", "nothing", "--merge")
    assert "--merge" in told
    told = refused(
        folder, "train", "--resume", "runs/whole", "-o", "model.options.lora={rank: 2}", "-o", "train.updates=2"
    )
    assert "the checkpoint is of whole models, and the job trains adapters" in told
