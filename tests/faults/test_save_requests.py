"""SIGUSR1 asks a job to save and to go on: it reaches whichever process of the job, ends none, and changes no bit."""

import json
import signal
from importlib.util import find_spec

import psutil
import pytest

from tests.faults.conftest import Runner, family, ranks_of, survivors

MORE = ["-o", "checkpoint.every_updates=1000", "-o", "checkpoint.every_epochs=null", "-o", "train.updates=30"]
MORE += ["-o", "train.ema.decay=0.9"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, digits) -> dict:
    runner = Runner(tmp_path_factory.mktemp("undisturbed"), digits)
    code, output = runner.run([*runner.arguments(name="whole"), *MORE])
    assert code == 0, output
    return runner.summary("whole")


def checkpoints(runner: Runner, name: str) -> list[tuple[int, str]]:
    """Update and reason of the checkpoints of a run, in their order."""
    rows = map(json.loads, (runner.run_folder(name) / "metrics.jsonl").read_text().splitlines())
    return [(row["update"], row["why"]) for row in rows if row["kind"] == "checkpoint"]


def to_mtrain(process) -> None:
    process.send_signal(signal.SIGUSR1)


def to_one_rank(process) -> None:
    ranks_of(process)[-1].send_signal(signal.SIGUSR1)


def to_every_process(process) -> None:
    """What a scheduler does to a job step."""
    for each in [psutil.Process(process.pid), *family(process)]:
        each.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "backend",
    [
        "ddp",
        *[
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.skipif(find_spec(library) is None, reason=library)])
            for name, library in (("horovod", "horovod"), ("deepspeed", "deepspeed"), ("fleet", "paddle"))
        ],
    ],
)
def test_sigusr1_to_every_process_saves_once_and_the_job_ends_with_the_same_bits(runner, undisturbed, backend):
    process = runner.start([*runner.arguments(name="asked", backend=backend), *MORE])
    runner.wait_for_update("asked", 2, process)
    everybody = family(process)
    to_every_process(process)
    code, output = runner.finish(process)
    assert code == 0, output
    (update, why), *rest = checkpoints(runner, "asked")
    assert why == "requested"
    assert 2 < update < 30
    assert [each for _, each in rest if each == "requested"] == []
    assert "SIGUSR1: the ranks were asked to save at the next update, and to go on" in output
    assert f"saved at update {update}, as SIGUSR1 asked" in output
    assert survivors(everybody) == []
    if backend == "ddp":
        assert runner.summary("asked")["weights_sha256"] == undisturbed["weights_sha256"]
        assert runner.summary("asked")["ema_sha256"] == undisturbed["ema_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("strike", [to_mtrain, to_one_rank])
def test_sigusr1_to_one_process_of_a_job_has_all_ranks_save(runner, undisturbed, strike):
    process = runner.start([*runner.arguments(name="asked"), *MORE])
    runner.wait_for_update("asked", 2, process)
    strike(process)
    code, output = runner.finish(process)
    assert code == 0, output
    assert next(why for _, why in checkpoints(runner, "asked")) == "requested"
    assert runner.summary("asked")["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_job_goes_on_from_a_requested_checkpoint_to_the_same_bits_and_a_signal_while_it_starts_is_kept(
    runner, undisturbed
):
    process = runner.start([*runner.arguments(name="asked"), *MORE])
    while len(ranks_of(process)) < 2:
        assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGUSR1)
    runner.wait_for_update("asked", 5, process)
    assert checkpoints(runner, "asked") == [(1, "requested")]
    for rank in ranks_of(process):
        rank.kill()
    runner.finish(process)
    resumed = [*runner.arguments(name="asked"), *MORE, "--resume", str(runner.run_folder("asked"))]
    code, output = runner.run(resumed)
    assert code == 0, output
    assert "step-00000001" in output
    assert runner.summary("asked")["weights_sha256"] == undisturbed["weights_sha256"]
