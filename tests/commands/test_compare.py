"""``mtrain compare`` with real jobs: backends that are planted wrong are found and described, right ones agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.compare.request import parse_variants
from mtrain.errors import UsageError

FAULTY = Path(__file__).parent / "faulty" / "plugins.toml"
SPEC = [
    "-c", "vit_digits", "-o", f"plugins={FAULTY}", "backend.options.device=cpu", "data.workers=1", "train.accumulate=2",
    "train.clip_norm=null", "optimizer.rule=sgd", "optimizer.nesterov=false", "optimizer.learning_rate=0.01", "schedule.warmup=null",
]  # fmt: skip


def compare(folder: Path, backends: str, *more: str, status: int) -> tuple[dict, str]:
    """(compare.json, what was printed)."""
    command = [sys.executable, "-m", "mtrain", "compare", *SPEC, *more, "--backends", backends, "--out", str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, cwd=folder.parent, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert process.returncode == status, process.stdout + process.stderr
    page = (folder / "compare.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    return json.loads((folder / "compare.json").read_text()), process.stdout


def rows_of(comparison: dict) -> dict[str, dict]:
    return {row["label"]: row for row in comparison["backends"]}


@pytest.mark.slow
def test_faulty_backends_are_detected_and_their_faults_named(tmp_path):
    actual, printed = compare(
        tmp_path / "out",
        "solo,clipping,summing,sluggish,elsewhere",
        "--updates",
        "4",
        "--ranks",
        "1",
        "--rounds",
        "0",
        status=1,
    )
    rows = rows_of(actual)
    assert actual["reference"] == "solo"
    verdicts = [row["verdict"] for row in rows.values()]
    assert (verdicts[0], verdicts[-1]) == ("reference", "not installed")
    assert set(verdicts[1:-1]) <= {"differs", "inexact"}, "a gradient that is far from float64 is called inexact"
    values = {label: row["against_reference"] for label, row in rows.items() if "against_reference" in row}
    assert {label: (one["first_update"], one["first_in"][0]) for label, one in values.items()} == {
        "clipping": (0, "moments"), "summing": (0, "gradient norm"), "sluggish": (1, "moments"),
    }  # fmt: skip
    assert "it clips at 0.25, the spec says no limit" in values["clipping"]["causes"][0]
    assert (
        "the gradient of summing is 2 times that of solo: the loss is not divided by the 2 micro batches of an update"
        in values["summing"]["causes"][0]
    )
    assert "its momentum is 0.5, 0.9 was asked for" in values["sluggish"]["causes"][0]
    assert "a_library_that_nobody_has" in rows["elsewhere"]["reason"]
    headline = next(
        line for line in printed.splitlines() if "train like solo" in line or "too far from float64" in line
    )
    assert "summing" in headline
    assert not list((tmp_path / "out").rglob("*.safetensors")), "checkpoints take room and were read"


@pytest.mark.slow
def test_correct_backends_agree_bit_for_bit_and_in_every_run(tmp_path):
    actual, printed = compare(
        tmp_path / "out", "ddp,horovod,deepspeed:stage=3,solo", "--updates", "6", "--profile", "float32", status=0
    )
    rows = rows_of(actual)
    assert actual["same_bits"] == [["ddp", "horovod", "deepspeed:stage=3"], ["solo"]]
    assert rows["solo"]["verdict"] == "within float32"
    assert rows["solo"]["ranks"] == 1
    assert all(row["repeats"] for row in rows.values())
    assert all(len(row["speed"]["memory_bytes"]) == row["ranks"] for row in rows.values())
    gradients = 4 * 200_000
    assert gradients < rows["ddp"]["speed"]["sent_bytes"] < 1.1 * gradients, (
        "two ranks: each sends its 0.2 M gradients once"
    )
    assert "ddp, horovod and deepspeed:stage=3 are the same, bit for bit" in printed


@pytest.mark.job
def test_ranks_that_never_exchange_gradients_are_detected(tmp_path):
    """The whole of `mtrain compare` that runs every time; the others are slow."""
    actual, printed = compare(tmp_path / "out", "ddp,silent", "--updates", "2", "--rounds", "0", status=1)
    assert [row["verdict"] for row in rows_of(actual).values()] == ["reference", "ranks differ"]
    assert "silent does not train like ddp" in printed
    (cause, *_) = rows_of(actual)["silent"]["against_reference"]["causes"]
    assert "its ranks do not hold the same weights after update 1" in cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backends", "planted"),
    [
        ("solo,ddp,horovod,deepspeed:stage=3,fleet", "untaught"),
        ("solo,ddp,horovod,deepspeed:stage=0,fleet", "unmasked"),
    ],
)
def test_backends_agree_on_a_teacher_and_on_masks_and_one_without_is_detected(backends, planted, tmp_path):
    values = ("train.prune={sparsity: 0.5, norm_l1: 0.01, start: 0, end: 0.5, every_updates: 1}",)
    if planted == "untaught":
        teach = [*SPEC, "-b", "solo", "--nproc-per-node", "1", "--name", "teacher", "-o", "train.epochs=null"]
        command = [sys.executable, "-m", "mtrain", "train", *teach, "train.updates=3", "report.plots=false"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
        values = ("train.distil={teacher: runs/teacher, temperature: 2}",)
    more = ("--updates", "4", "--rounds", "0", "-o", "train.precision=fp64", *values)
    actual, printed = compare(tmp_path / "out", f"{backends},{planted}", *more, status=1)
    rows = rows_of(actual)
    verdicts = {label: row["verdict"] for label, row in rows.items()}
    print(printed)
    assert verdicts.pop(planted) == "differs"
    assert set(verdicts.values()) <= {"reference", "the same bits", "within float32"}
    assert len(verdicts) == len(backends.split(","))


@pytest.mark.slow
def test_a_backend_that_cannot_run_is_reported_and_the_others_are_compared(tmp_path):
    actual, printed = compare(
        tmp_path / "out", "solo,solo:framework=paddle,summing", "--updates", "2", "--ranks", "1", "--rounds", "0",
        "-o", "train.precision=bf16", status=1,
    )  # fmt: skip
    rows = rows_of(actual)
    assert rows["solo:framework=paddle"]["verdict"] == "refused"
    assert "bf16" in rows["solo:framework=paddle"]["reason"]
    assert rows["summing"]["verdict"] in ("differs", "inexact")
    assert "solo:framework=paddle refused the job" in printed


@pytest.mark.job
@pytest.mark.parametrize(
    "backend",
    ["late_ddp", *(pytest.param(f"late_{name}", marks=pytest.mark.slow) for name in ("horovod", "deepspeed", "fleet"))],
)
def test_waiting_for_a_slow_rank_raises_the_share_of_communication(backend, tmp_path):
    command = [
        *(
            sys.executable,
            "-m",
            "mtrain",
            "train",
            *SPEC,
            "report.trace=traffic",
            "report.name=late",
            "train.updates=6",
        ),
        *("evaluate.at_end=false", "train.accumulate=1", "--backend", backend, "--nproc-per-node", "2"),
    ]
    if backend == "late_deepspeed":
        command += ["-o", "backend.options.stage=3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    end = json.loads((tmp_path / "runs" / "late" / "metrics.jsonl").read_text().splitlines()[-1])
    waiting, late = (rank["communication_share"] for rank in end["measured"])
    assert waiting > 0.3, "six forward passes of sleep are more than the rest of an update"
    assert late < waiting


# ----------------------------------------------------------------------------------------------------------- wrong use
def test_an_entry_of_backends_may_set_options_and_values_of_the_spec():
    one, other = parse_variants("ddp, deepspeed:stage=3:offload=true:train.channels_last=false")
    assert (one.label, one.name, one.options) == ("ddp", "ddp", {})
    assert (other.name, other.options, other.overrides) == (
        "deepspeed", {"stage": 3, "offload": True}, ["train.channels_last=false"],
    )  # fmt: skip
    assert other.folder == "deepspeed-stage=3-offload=true-train.channels_last=false"


@pytest.mark.parametrize("text", ["", " , ", "ddp,ddp", "deepspeed:3", "deepspeed:=3", "ddp:timeout_s=[1,2]"])
def test_malformed_entries_of_backends_are_refused(text):
    with pytest.raises(UsageError, match="--backends"):
        parse_variants(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "ddp,nobody"], "no backend 'nobody'"),
        (["--backends", "ddp,deepspeed:stage=9"], "--backends deepspeed:stage=9.stage"),
        (["--backends", "ddp,deepspeed:stag=1"], "did you mean 'stage'"),
        (["--backends", "ddp,solo:train.batch=1"], "train.batch"),
        (["--backends", "ddp,ddp:train.updates=9"], "a comparison sets train.updates itself"),
        (["--backends", "ddp,ddp:cluster.log_dir=logs"], "a comparison sets cluster.log_dir itself"),
        (
            ["--backends", "ddp"],
            "--backends ddp: a comparison needs two backends or more; expected the reference and others",
        ),
        (["--backends", "deepspeed:stage=3,"], "--backends deepspeed:stage=3,: a comparison needs two backends"),
        (["--backends", "solo,ddp:backend.name=solo"], "a comparison sets backend.name itself"),
        (["--backends", "ddp,solo", "--out", f"{__file__}/out"], "cannot be made (Not a directory)"),
        (["--backends", "ddp,solo", "-o", "train.batch_size=7"], "does not divide"),
        (["--backends", "solo,elsewhere", "--ranks", "1", "-o", f"plugins={FAULTY}"], "a_library_that_nobody_has"),
        (["--backends", "ddp,solo", "-o", "launcher.name=torchrun"], "backend 'solo' needs 'none': use `auto`"),
        (["--backends", "ddp,broken", "-o", f"plugins={FAULTY}"], "'broken' (faulty_backends:Broken) cannot be made"),
        (["--backends", "ddp", "--profile", "exact"], "--profile exact: expected bitwise, float32 or loose"),
        ([], "error: --backends is missing"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "-c", "vit_digits", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not (tmp_path / "runs").exists()
