"""Optimizers of torch and of the script: what a plain loop trains, on whole arrays and on parts of them."""

import sys

import pytest

from mtrain.core.checkpoint import store
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary

sys.path.insert(0, str(SCRIPTS))
import train_native

SCRIPT = str(SCRIPTS / "train_native.py")
NOT_ELEMENTWISE = ("Muon", "Adafactor")
ELEMENTWISE = ("Lion", "ScheduleFree", "NAdam")
ZERO = {stage: ("-b", "deepspeed", "-o", f"backend.options.stage={stage}") for stage in (1, 2, 3)}


def newest(here, name):
    """Return the state of a run's newest checkpoint."""
    return store.load(store.newest(here / "runs" / name / "checkpoints")).state


def trained(here, name):
    """Return the weights of a run and those to evaluate with."""
    state = newest(here, name)
    return {**state.weights, **{f"ema {key}": array for key, array in state.ema.items()}}


@pytest.fixture(scope="module")
def plain():
    """Return a function that returns what a plain loop trains."""
    known = {}

    def arrays_of(*names):
        if names not in known:
            known[names] = train_native.plain(names, 10)
        return known[names]

    return arrays_of


@pytest.mark.parametrize("name", [*NOT_ELEMENTWISE, *ELEMENTWISE])
def test_one_rank_trains_and_evaluates_the_bits_of_a_plain_loop(name, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    train_native.train([name], 10, seed=train_native.SEED, precision="fp64")
    ours = trained(tmp_path, "latest")
    assert largest_difference(ours, plain(name)) == 0
    assert ("ema first.weight" in ours) == (name == "ScheduleFree")


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "size"), [("ddp", 2), pytest.param("horovod", 2, marks=pytest.mark.slow), pytest.param("ddp", 3, marks=pytest.mark.slow)]
)  # fmt: skip
def test_several_ranks_train_what_a_plain_loop_trains(backend, size, plain, tmp_path):
    names = (*NOT_ELEMENTWISE, *ELEMENTWISE)
    done(tmp_path, "--name", "some", "-b", backend, "--nproc-per-node", str(size), SCRIPT, *names)
    difference = largest_difference(trained(tmp_path, "some"), plain(*names))
    print(f"{', '.join(names)} on {size} ranks of {backend}: largest difference to a plain loop {difference:.1e}")
    assert difference <= 1e-12


WAYS = {
    "whole to parts": [(3, "ddp", 2), (6, 3, 3), (10, 1, 2)],
    "parts to whole": [(3, 2, 2), (6, "solo", 1), (10, 3, 2)],
    "between libraries": [(3, "fsdp", 2), (6, 3, 2), (10, "fsdp", 3)],
}
QUICK = [("ScheduleFree", "whole to parts")]


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.slow)
        for name in (*ELEMENTWISE, "SGD", "Adagrad", "RMSprop", "Adam")
        for way in WAYS
    ],
)
def test_a_job_goes_from_backend_to_backend_and_from_rank_count_to_rank_count(name, way, plain, tmp_path):
    """Each job goes on from the checkpoint of the one before: groups, schedule, decay and state."""
    for number, (updates, backend, size) in enumerate(WAYS[way]):
        words = ZERO.get(backend, ("-b", str(backend)))
        start = ("--resume", "runs/one") if number else ("--name", "one")
        done(tmp_path, *start, *words, "--nproc-per-node", str(size), SCRIPT, name, "--updates", str(updates))
    assert summary(tmp_path, "one")["updates"] == 10
    difference = largest_difference(trained(tmp_path, "one"), plain(name))
    print(f"{name}, {way}: largest difference to a plain loop {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.job
def test_a_rule_that_needs_whole_arrays_is_refused_before_training(tmp_path):
    result = run(tmp_path, *ZERO[1], "--nproc-per-node", "2", SCRIPT, "Muon")
    assert result.returncode == 2
    assert "this backend splits arrays over the ranks, but Muon fails on parts of arrays: ValueError" in result.stderr
    assert "use backend solo, ddp, horovod or deepspeed with stage 0" in result.stderr
    assert "Traceback" not in result.stderr
