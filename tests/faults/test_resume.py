"""A job that was killed goes on as if nothing had happened: real ranks, real signals."""

import shutil
import signal

import pytest

from tests.faults.conftest import UPDATES, Runner, family, ranks_of, survivors


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, digits) -> dict:
    runner = Runner(tmp_path_factory.mktemp("undisturbed"), digits)
    code, output = runner.run(runner.arguments(name="whole"))
    assert code == 0, output
    return {
        "summary": runner.summary("whole"),
        "updates": runner.updates("whole"),
        "folder": runner.run_folder("whole"),
    }


@pytest.mark.parametrize("update", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_in_mid_epoch_and_resumed_ends_with_the_same_bits(runner, undisturbed, update):
    process = runner.start(runner.arguments(name="killed"))
    runner.wait_for_update("killed", update, process)
    everybody = family(process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    for rank in ranks:
        rank.kill()
    code, output = runner.finish(process)
    assert code == 1, output
    assert survivors(everybody) == []
    code, output = runner.run([*runner.arguments(name="killed"), "--resume", str(runner.run_folder("killed"))])
    assert code == 0, output
    resumed = runner.summary("killed")
    assert resumed["updates"] == UPDATES
    assert resumed["weights_sha256"] == undisturbed["summary"]["weights_sha256"]
    assert resumed["ema_sha256"] == undisturbed["summary"]["ema_sha256"]


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_job_that_is_asked_to_end_saves_and_goes_on_later_to_the_same_bits(runner, undisturbed, number, expected):
    process = runner.start(runner.arguments(name="asked"))
    runner.wait_for_update("asked", 1, process)
    everybody = family(process)
    process.send_signal(number)
    code, output = runner.finish(process)
    assert code == expected, output
    assert survivors(everybody) == []
    code, output = runner.run([*runner.arguments(name="asked"), "--resume", str(runner.run_folder("asked"))])
    assert code == 0, output
    assert runner.summary("asked")["weights_sha256"] == undisturbed["summary"]["weights_sha256"]


def test_another_number_of_ranks_keeps_order_and_global_batch(runner, undisturbed):
    checkpoint = undisturbed["folder"] / "checkpoints"
    before_last = sorted(checkpoint.iterdir())[-2]
    target = runner.run_folder("other") / "checkpoints" / before_last.name
    shutil.copytree(before_last, target)
    arguments = runner.arguments(name="other", backend="solo", ranks=1)
    code, output = runner.run([*arguments, "--resume", str(runner.run_folder("other"))])
    assert code == 0, output
    last = runner.updates("other")[-1]
    reference = undisturbed["updates"][-1]
    assert (last["update"], last["epoch"], last["position"]) == (UPDATES - 1, 1, 4)
    assert last["learning_rates"] == reference["learning_rates"]
    # Same images; BatchNorm sees four of them at once instead of two, so the loss is near and not equal.
    assert last["losses"]["total"] == pytest.approx(reference["losses"]["total"], rel=0.2)


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(runner, undisturbed):
    shutil.copytree(undisturbed["folder"], runner.run_folder("damaged"))
    newest = sorted((runner.run_folder("damaged") / "checkpoints").iterdir())[-1]
    weights = newest / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(bytes(content))
    code, output = runner.run([*runner.arguments(name="damaged"), "--resume", str(runner.run_folder("damaged"))])
    assert code == 0, output
    assert newest.name in output
    assert runner.summary("damaged")["weights_sha256"] == undisturbed["summary"]["weights_sha256"]
