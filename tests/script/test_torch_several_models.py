"""Scripts with several models, and with an order of their own of backward passes and steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mtrain.core.checkpoint import store
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights
from tests.starts import starts_processes

SCRIPT = str(SCRIPTS / "train_several.py")
FP64 = ("-o", "train.precision=fp64")
LOOPS = ("gan", "critic", "joint", "surgery", "steps", "plateau", "target", "dqn", "sac")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that returns the weights of a loop as a plain script."""
    known: dict[str, dict] = {}
    folder = tmp_path_factory.mktemp("plain")

    def weights_of(loop: str) -> dict:
        if loop not in known:
            file = folder / f"{loop}.npz"
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, SCRIPT, loop, "--plain", str(file)], check=True, env=environ)
            with np.load(file) as arrays:
                known[loop] = dict(arrays)
        return known[loop]

    return weights_of


@pytest.mark.job
@pytest.mark.parametrize("loop", LOOPS)
def test_one_rank_trains_the_bits_of_the_plain_script(loop, plain, tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", *FP64, SCRIPT, loop)
    ours = weights(tmp_path, "one")
    assert ours.keys() == plain(loop).keys()
    assert largest_difference(ours, plain(loop)) == 0


def updates_of(here: Path, name: str) -> list[dict]:
    """Return the records of a run's updates."""
    records = map(json.loads, (here / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "update"]


SIZES = [
    ("ddp", 2, ()),
    ("horovod", 2, ("gan",)),
    ("ddp", 3, ("critic",)),
]


@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "size", "loop"),
    [
        pytest.param(
            backend, size, loop, marks=() if loop in quick or (not quick and loop != "steps") else pytest.mark.slow
        )
        for backend, size, quick in SIZES
        for loop in LOOPS
    ],
)
def test_several_ranks_train_what_the_plain_script_trains(backend, size, loop, plain, tmp_path):
    done(tmp_path, "--name", "some", "--backend", backend, "--nproc-per-node", str(size), *FP64, SCRIPT, loop)
    ours = weights(tmp_path, "some")
    # Each rank has called the model for its own share.
    difference = largest_difference(ours, plain(loop))
    print(f"{loop} on {size} ranks of {backend}: largest difference to the plain script {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.job
def test_a_gan_that_was_killed_goes_on_with_the_same_bits(tmp_path):
    words = ("--backend", "ddp", "--nproc-per-node", "2", *FP64, "-o", "checkpoint.every_updates=2")
    environ = {"SCHEDULE": "cosine", "DROPOUT": "0.2"}
    done(tmp_path, "--name", "whole", *words, SCRIPT, "critic", environ=environ)
    killed = run(tmp_path, "--name", "killed", *words, SCRIPT, "critic", environ={**environ, "KILLED_IN": "7"})
    assert killed.returncode != 0
    words = ("--backend", "ddp", "--nproc-per-node", "2", *FP64)
    done(tmp_path, "--resume", "runs/killed", *words, SCRIPT, "critic", environ=environ)
    assert summary(tmp_path, "killed")["updates"] == 10
    assert summary(tmp_path, "killed")["weights_sha256"] == summary(tmp_path, "whole")["weights_sha256"]


@pytest.mark.job
def test_a_slow_copy_that_no_update_trains_is_in_checkpoints(tmp_path):
    words = ("--backend", "solo", *FP64)
    done(tmp_path, "--name", "whole", *words, SCRIPT, "target")
    saving = ("-o", "checkpoint.every_updates=2")
    assert run(tmp_path, "--name", "killed", *words, *saving, SCRIPT, "target", environ={"KILLED_IN": "7"}).returncode
    done(tmp_path, "--resume", "runs/killed", *words, SCRIPT, "target")
    assert summary(tmp_path, "killed")["weights_sha256"] == summary(tmp_path, "whole")["weights_sha256"]


@pytest.mark.job
def test_several_models_and_their_dropout_follow_the_shard(tmp_path):
    dropout = {"DROPOUT": "0.3"}
    done(
        tmp_path,
        "--name",
        "two",
        "--backend",
        "ddp",
        "--nproc-per-node",
        "2",
        *FP64,
        SCRIPT,
        "together",
        environ=dropout,
    )
    done(
        tmp_path,
        "--name",
        "one",
        "--backend",
        "solo",
        "-o",
        "cluster.shards=2",
        *FP64,
        SCRIPT,
        "together",
        environ=dropout,
    )
    one, two = weights(tmp_path, "one"), weights(tmp_path, "two")
    assert int(one.pop("G/calls")) == int(two.pop("G/calls")) == 10
    assert largest_difference(one, two) <= 1e-12


@pytest.mark.job
def test_a_loss_after_the_step_of_another_model_is_refused_where_ranks_compute_shards_in_turn(tmp_path):
    result = run(tmp_path, "--backend", "solo", "-o", "cluster.shards=2", *FP64, SCRIPT, "gan")
    assert result.returncode == 2
    assert (
        "G's optimizer.update (update 0, micro batch 0 of 2): called after the step of another model" in result.stderr
    )
    assert "call `backward` of all models first, and then `step` of all" in result.stderr


@pytest.mark.job
def test_a_dataloader_is_divided_among_ranks_and_goes_on_in_mid_epoch(tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", *FP64, SCRIPT, "loader")
    words = ("--backend", "ddp", "--nproc-per-node", "2", *FP64, "-o", "checkpoint.every_updates=2")
    killed = run(tmp_path, "--name", "two", *words, SCRIPT, "loader", environ={"KILLED_IN": "7"})
    assert killed.returncode != 0
    done(tmp_path, "--resume", "runs/two", "--backend", "ddp", "--nproc-per-node", "2", *FP64, SCRIPT, "loader")
    assert summary(tmp_path, "two")["updates"] == 10
    assert largest_difference(weights(tmp_path, "two"), weights(tmp_path, "one")) <= 1e-12


@pytest.mark.job
def test_a_scheduler_that_the_script_steps_goes_on_where_it_was(tmp_path):
    words = ("--backend", "ddp", "--nproc-per-node", "2", *FP64)
    done(tmp_path, "--name", "whole", *words, SCRIPT, "plateau")
    saving = ("-o", "checkpoint.every_updates=2")
    assert run(tmp_path, "--name", "killed", *words, *saving, SCRIPT, "plateau", environ={"KILLED_IN": "7"}).returncode
    done(tmp_path, "--resume", "runs/killed", *words, SCRIPT, "plateau")
    assert summary(tmp_path, "killed")["weights_sha256"] == summary(tmp_path, "whole")["weights_sha256"]
    rates = [record["learning_rates"] for record in updates_of(tmp_path, "whole")]
    assert rates[0] == [0.005, 0.005]
    assert rates[-1] == [pytest.approx(0.005 / 2**4), pytest.approx(0.005 * 0.7**2)]


@pytest.mark.job
def test_a_scheduler_that_sees_one_rank_only_is_told(tmp_path):
    words = ("--backend", "ddp", "--nproc-per-node", "2", *FP64)
    result = run(tmp_path, *words, SCRIPT, "plateau", environ={"SEES_ITS_RANK": "1"})
    assert result.returncode == 2
    assert "the ranks have different learning rates or momenta in update" in result.stderr
    assert "step the scheduler by a value that is equal on all ranks" in result.stderr


@pytest.mark.smoke
@pytest.mark.job
def test_each_model_has_its_arrays_counts_and_losses_under_its_name(tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", *FP64, SCRIPT, "critic")
    state = store.load(store.newest(tmp_path / "runs/one/checkpoints")).state
    assert {name.partition("/")[0] for name in state.weights} == {"G", "D"}
    assert {name.partition("/")[2].partition("/")[0] for name in state.moments} == {"G", "D"}
    # The generator is trained after every third batch of ten.
    assert (state.counters["D/updates"], state.counters["G/updates"]) == (10, 3)
    updates = updates_of(tmp_path, "one")
    assert [set(record["losses"]) for record in updates[:3]] == [{"loss_D"}, {"loss_D"}, {"loss_D", "loss_G"}]
    assert [record["models"]["G"]["updates"] for record in updates] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert [record["models"]["G"]["gradient_norm"] is None for record in updates[:3]] == [True, True, False]


@pytest.mark.job
def test_a_model_that_the_checkpoint_lacks_is_named(tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", *FP64, SCRIPT, "gan", "--updates", "2")
    result = run(tmp_path, "--resume", "runs/one", SCRIPT, "joint", "--updates", "4")
    assert result.returncode == 2
    assert "a model named decoder is prepared, but the checkpoint has the models D, G" in result.stderr
    result = run(tmp_path, "--resume", "runs/one", SCRIPT, "steps", "--updates", "4")
    assert "a model without a name is prepared, but the checkpoint has the models D, G" in result.stderr


RELEASED = (
    "backend.options.config={zero_optimization: {stage3_param_persistence_threshold: 0, stage3_max_live_parameters: 0, "
    "stage3_max_reuse_distance: 0}}"
)
"""Makes stage 3 drop whole weights of small models too."""
SPLIT = {
    "zero 0": ("-b", "deepspeed", "-o", "backend.options.stage=0"),
    "zero 1": ("-b", "deepspeed", "-o", "backend.options.stage=1"),
    "zero 2": ("-b", "deepspeed", "-o", "backend.options.stage=2"),
    "zero 3": ("-b", "deepspeed", "-o", "backend.options.stage=3", "-o", RELEASED),
    "fsdp": ("-b", "fsdp"),
}
QUICK = [("zero 3", 2, "sac"), ("fsdp", 2, "gan")]


@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "size", "loop"),
    [
        pytest.param(backend, size, loop, marks=() if (backend, size, loop) in QUICK else pytest.mark.slow)
        for backend in SPLIT
        for size in (2, 3)
        for loop in ("gan", "sac", "critic", "joint", "plateau")
        if (backend, loop) not in [("zero 3", "joint"), ("fsdp", "critic")]
    ],
)
def test_models_whose_arrays_are_split_train_what_the_plain_script_trains(backend, size, loop, plain, tmp_path):
    words = (*SPLIT[backend], "--nproc-per-node", str(size), *FP64)
    saving = ("-o", "checkpoint.every_updates=2")
    start = "--name"
    if loop == "sac":  # killed and resumed, too
        assert run(tmp_path, "--name", "some", *words, *saving, SCRIPT, loop, environ={"KILLED_IN": "6"}).returncode
        start = "--resume"
    done(tmp_path, start, "runs/some" if start == "--resume" else "some", *words, SCRIPT, loop)
    difference = largest_difference(weights(tmp_path, "some"), plain(loop))
    print(f"{loop} on {size} ranks of {backend}: largest difference to the plain script {difference:.1e}")
    assert difference <= 1e-12


REFUSED = [
    (("zero 3", "joint"), "goes through one graph twice, which backend.options.stage 3 cannot", False),
    (("fsdp", "critic"), "a gradient of a gradient (create_graph=True) is wanted of a model on backend fsdp", True),
    (("zero 1", "surgery"), "optimizer.gradients: this backend has no whole gradients to show", True),
]


@pytest.mark.job
@pytest.mark.parametrize(
    ("case", "message"), [pytest.param(case, message, marks=pytest.mark.slow if slow else ()) for case, message, slow in REFUSED]
)  # fmt: skip
def test_what_a_backend_that_splits_arrays_cannot_do_is_told_in_one_sentence(case, message, tmp_path):
    result = run(tmp_path, *SPLIT[case[0]], "--nproc-per-node", "2", *FP64, SCRIPT, case[1])
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.job
def test_a_backend_that_cannot_train_in_another_order_says_so_before_training(tmp_path):
    words = ("--backend", "deepspeed", "-o", "backend.options.reduction=micro_batch", "--nproc-per-node", "2", *FP64)
    result = run(tmp_path, *words, SCRIPT, "gan")
    assert result.returncode == 2
    assert "backend.options.reduction: micro_batch given for several models" in result.stderr


@pytest.mark.job
def test_zero_shows_no_gradients_of_split_arrays(tmp_path):
    words = ("--backend", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=2")
    result = run(tmp_path, *words, *FP64, SCRIPT, "steps")
    assert result.returncode == 2
    assert "optimizer.gradients: this backend has no whole gradients to show" in result.stderr


@pytest.mark.job
def test_ranks_that_train_different_models_are_told(tmp_path):
    result = run(tmp_path, "--backend", "ddp", "--nproc-per-node", "2", *FP64, SCRIPT, "apart")
    assert result.returncode == 2
    assert "the ranks have trained different models in update 0 (this rank: " in result.stderr


@pytest.fixture(scope="module")
@starts_processes
def plain_paddle(tmp_path_factory):
    file = tmp_path_factory.mktemp("plain") / "gan.npz"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = str(SCRIPTS / "train_several_paddle.py")
    subprocess.run([sys.executable, script, "--plain", str(file)], check=True, env=environ)
    with np.load(file) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gan_of_paddle_trains_what_the_plain_script_trains(size, plain_paddle, tmp_path):
    words = ("--backend", "fleet", "--nproc-per-node", str(size), *FP64)
    done(tmp_path, "--name", "some", *words, str(SCRIPTS / "train_several_paddle.py"))
    difference = largest_difference(weights(tmp_path, "some"), plain_paddle)
    print(f"a GAN on {size} ranks of fleet: largest difference to the plain script {difference:.1e}")
    # Not 0: gradients of two losses are added in another order than in Paddle's own backward pass.
    assert difference <= 1e-12


@pytest.mark.job
def test_a_teacher_of_paddle_follows_its_student(tmp_path):
    """The script compares with numpy in each update."""
    done(tmp_path, "--name", "one", "--backend", "fleet", str(SCRIPTS / "train_following_paddle.py"))
    assert summary(tmp_path, "one")["updates"] == 3


@pytest.mark.job
def test_the_weights_of_one_of_several_models_leave_under_the_names_of_its_module(tmp_path):
    done(tmp_path, "--name", "one", "--backend", "solo", *FP64, SCRIPT, "gan", "--updates", "2")
    export = [sys.executable, "-m", "mtrain", "weights", "export", "runs/one", "--to"]
    result = subprocess.run([*export, "g.safetensors", "--model", "G"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    arrays, saved = load_file(tmp_path / "g.safetensors"), weights(tmp_path, "one")
    assert arrays.keys() == {name.removeprefix("G/") for name in saved if name.startswith("G/")}
    assert all(np.array_equal(array, saved[f"G/{name}"]) for name, array in arrays.items())
    for words in ((), ("--model", "X")):
        result = subprocess.run([*export, "all.pt", *words], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 2
        assert "has the models D, G; give --model D" in result.stderr


@pytest.mark.job
def test_backends_are_compared_over_all_losses_and_gradients(tmp_path):
    words = [sys.executable, "-m", "mtrain", "compare", "-b", "ddp,horovod", "--updates", "4", "--script", SCRIPT]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*words, "--", "critic"], cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = json.loads((tmp_path / "runs/compare/compare.json").read_text())
    losses = next(row for row in numbers["backends"] if row["label"] == "horovod")["losses"]
    assert set(losses) == {"total", "loss_G", "loss_D"}
    assert [loss == 0 for loss in losses["loss_G"]] == [True, True, False, True]
    assert losses["total"][2] == pytest.approx(losses["loss_G"][2] + losses["loss_D"][2])
