"""Ports of Horovod's TensorFlow examples: unmodified and with mtrain_tensorflow.keras, on real ranks, compared with one process."""

import signal

import numpy as np
import pytest
from tests.keras import jobs
from tests.keras.jobs import PORTS, difference, needs_tensorflow, trained

from mtrain.core.checkpoint import store

pytestmark = [needs_tensorflow, pytest.mark.job]
EVERY_4 = ("-o", "checkpoint.every_updates=4")
KERAS, TAPE, SESSION = (PORTS / name for name in ("horovod_keras", "horovod_tape", "horovod_session"))


def test_a_killed_job_of_two_ranks_ends_with_the_weights_of_one_process(tmp_path):
    """The unmodified example on one rank, and the port on two, killed in the middle of an epoch and resumed."""
    whole = trained(tmp_path / "whole", KERAS / "peer.py", 1)
    here = tmp_path / "killed"
    job = jobs.started(
        here, KERAS / "port.py", 2, *EVERY_4, "--name", "a", until="runs/a/checkpoints/step-00000020/MANIFEST.json"
    )
    jobs.kill_all(job)
    assert not (here / "weights.npz").exists()
    newest = store.newest(here / "runs/a/checkpoints")
    saved = store.load(newest)
    assert (saved.progress.epoch, saved.progress.position > 0) == (1, True), "it was to end in the middle of an epoch"
    resumed = trained(here, KERAS / "port.py", 2, *EVERY_4, "--resume", "runs/a")
    largest = difference(whole, resumed)
    print(f"killed after update {saved.progress.update}, resumed: {largest:.1e}")
    assert largest <= 1e-12
    found = jobs.records(here, "a")
    assert [record["update"] for record in found if record["kind"] == "update"][-1] == 44
    assert found[-1]["reason"] == "done"
    _check_arrays(here, resumed)
    log = (here / "runs/a/logs/rank-0.log").read_text()
    assert "Traceback" not in log


def _check_arrays(here, final):
    """The last checkpoint holds the final weights and Adam's moments, for a reader that has numpy alone."""
    newest = store.newest(here / "runs/a/checkpoints")
    arrays = _plain(jobs.read_by_numpy(newest / "weights.safetensors"))
    assert arrays.keys() == {name.replace("/", ".").partition(":")[0] for name in final}
    assert all(np.array_equal(arrays[name.replace("/", ".").partition(":")[0]], value) for name, value in final.items())
    moments = _plain(jobs.read_by_numpy(newest / "optimizer.safetensors"))
    assert moments.keys() == {f"{moment}/{name}" for name in arrays for moment in ("m", "v")}


def _plain(arrays):
    """The format puts a mark before each name."""
    return {name.removeprefix("/"): array for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", [KERAS, TAPE, SESSION], ids=lambda folder: folder.name)
def test_unmodified_examples_train_alike_on_one_two_and_three_ranks(folder, tmp_path):
    one, two, three = (trained(tmp_path / str(ranks), folder / "peer.py", ranks) for ranks in (1, 2, 3))
    print(f"{folder.name}: {difference(one, two):.1e} {difference(one, three):.1e}")
    assert max(difference(one, two), difference(one, three)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("folder", [KERAS, TAPE], ids=lambda folder: folder.name)
def test_a_port_that_was_asked_to_end_saves_exactly_and_goes_on(folder, ranks, tmp_path):
    whole = trained(tmp_path / "whole", folder / "port.py", ranks)
    here = tmp_path / "ended"
    job = jobs.started(
        here, folder / "port.py", ranks, *EVERY_4, "--name", "a", until="runs/a/checkpoints/step-00000012"
    )
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 143
    saved = store.load(store.newest(here / "runs/a/checkpoints"))
    last = [record for record in jobs.records(here, "a") if record["kind"] == "update"][-1]
    assert saved.progress.update == last["update"] + 1 < 45
    resumed = trained(here, folder / "port.py", ranks, *EVERY_4, "--resume", "runs/a")
    assert difference(whole, resumed) == 0.0


@pytest.mark.slow
def test_a_session_of_tensorflow_1_goes_on_from_its_own_checkpoint(tmp_path):
    """mtrain restarts a job whose rank was killed, and the unmodified script finds its own files."""
    whole = trained(tmp_path / "whole", SESSION / "peer.py", 2)
    killing = (
        (SESSION / "peer.py")
        .read_text()
        .replace(
            '            done = final.pop("step")\n',
            '            done = final.pop("step")\n'
            "            if done == 25 and not os.path.exists('killed'):\n"
            "                open('killed', 'w').close()\n"
            "                os.kill(os.getpid(), 9)\n",
        )
    )
    here = tmp_path / "killed"
    here.mkdir()
    assert "os.kill" in killing
    (here / "peer.py").write_text(killing)
    restarted = trained(here, here / "peer.py", 2, "-o", "cluster.max_restarts=1")
    assert (here / "killed").exists()
    assert difference(whole, restarted) <= 1e-12
