"""Jobs whose images are drawn by weights that follow their evaluations: resumed in mid-epoch, and on other backends."""

import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import UPDATES, Runner

# Ten updates find nothing, so every AP would be 0. This reporter is imported by every rank and makes other metrics.
METRICS = """
from mtrain.rank.spec.train import TrainingRun
from mtrain.tasks.detection.evaluator import CocoEvaluator

evaluate, result, now = TrainingRun.evaluate, CocoEvaluator.result, [0]

def evaluated(self, progress):
    now[0] = progress.update
    return evaluate(self, progress)

def metrics(self, partials):
    return {**result(self, partials), **{f"AP/{i}": (7 * now[0] + 3 * i) % 10 / 10 for i in range(10)}}

TrainingRun.evaluate, CocoEvaluator.result = evaluated, metrics

class Metrics:
    every_rank = True

    def start(self, record):
        pass
"""


def arguments(runner: Runner, name: str, *, backend: str = "ddp", ranks: int = 2) -> list[str]:
    (runner.folder / "metrics.py").write_text(METRICS)
    values = {
        "data.image_weights": "true",
        "evaluate.every_updates": 3,
        "checkpoint.keep_last": UPDATES,
        "report.trace": "state",
        "report.reporters": f"{{{runner.folder}/metrics.py:Metrics: true}}",
        "cluster.threads": 1,
        "train.max_micro_batch": 2,
    }
    pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    return [*runner.arguments(name=name, backend=backend, ranks=ranks), *pairs]


def whole(runner: Runner, name: str, **where: object) -> list[str]:
    """Run a job to its end; return the digests of the samples of its updates."""
    code, output = runner.run(arguments(runner, name, **where))  # type: ignore[arg-type]
    assert code == 0, output
    return [record["trace"]["samples"] for record in runner.updates(name)]


def resumed_from(runner: Runner, name: str, checkpoint: Path, *more: str) -> list[str]:
    shutil.copytree(checkpoint, runner.run_folder(name) / "checkpoints" / checkpoint.name)
    code, output = runner.run([*arguments(runner, name), "--resume", str(runner.run_folder(name)), *more])
    assert code == 0, output
    return [record["trace"]["samples"] for record in runner.updates(name)]


# After updates 7 and 3 the last evaluation is newer than the weights of the epoch; after 5 an epoch begins.
@pytest.mark.parametrize("updates", [[7], pytest.param([3, 5], marks=pytest.mark.slow)])
def test_a_job_resumed_in_mid_epoch_draws_the_same_images_to_the_same_bits(runner: Runner, updates: list[int]) -> None:
    samples = whole(runner, "whole")
    checkpoints = sorted((runner.run_folder("whole") / "checkpoints").iterdir())
    for update in updates:
        name = f"from-{update}"
        assert resumed_from(runner, name, checkpoints[update - 1]) == samples[update:]
        assert runner.summary(name)["weights_sha256"] == runner.summary("whole")["weights_sha256"]
        assert runner.summary(name)["ema_sha256"] == runner.summary("whole")["ema_sha256"]


@pytest.mark.slow
def test_all_backends_draw_the_same_images_and_another_choice_is_told(runner: Runner) -> None:
    samples = whole(runner, "ddp")
    for backend in ("horovod", "deepspeed", "fleet"):
        assert whole(runner, backend, backend=backend) == samples
    assert whole(runner, "solo", backend="solo", ranks=1) == samples
    checkpoint = sorted((runner.run_folder("ddp") / "checkpoints").iterdir())[6]
    assert resumed_from(runner, "plain", checkpoint, "-o", "data.image_weights=false") != samples[7:]
    records = (runner.run_folder("plain") / "metrics.jsonl").read_text()
    assert "was trained on samples drawn by weights" in records
