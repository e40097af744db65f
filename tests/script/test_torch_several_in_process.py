"""Several models in one process: the bits of the plain script, of the undisturbed training, and of each shard."""

import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.core.network.noise import shard_seed
from mtrain.core.ranks.agreement import Agreement
from mtrain.errors import ScriptError
from mtrain.rank.records import RANDOM_SHARDS
from tests.ports import held_port
from tests.script.in_process import length, plain_weights, rank_of, resumed, train_several, trained
from tests.script.runs import largest_difference

SOLO = ("backend.name=solo", "backend.options.framework=torch")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("loop", ["gan", "joint", "sac"])
def test_one_rank_trains_the_bits_of_the_plain_script(tmp_path, loop):
    assert largest_difference(trained(tmp_path / "run", loop, *SOLO).state.weights, plain_weights(loop)) == 0


@pytest.mark.parametrize("loop", ["critic", "plateau", "dqn"])
def test_a_job_that_was_killed_goes_on_with_the_same_bits(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(train_several, "SCHEDULE", mtrain.Cosine())
    monkeypatch.setattr(train_several, "DROPOUT", 0.2)
    whole = trained(tmp_path / "whole", loop, *SOLO)
    cut = resumed(tmp_path / "cut", loop, *SOLO, monkeypatch=monkeypatch)
    assert largest_difference(cut.state.weights, whole.state.weights) == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_random_numbers_of_several_models_are_those_of_the_shard_before_and_after_a_step(tmp_path, shards):
    """The generators are seeded for each shard of an update, and by no model in between."""
    with rank_of(tmp_path / "run", *SOLO, f"cluster.shards={shards}"), mtrain.session() as session:
        models = [
            session.prepare(
                lambda: torch.nn.Linear(6, 1), optimizer=train_several.adam, name=n, seed=train_several.SEED
            )
            for n in "ab"
        ]
        for number, (x, _) in enumerate(session.batches(train_several.Noisy(), **length(3))):
            drawn = [torch.rand(2)]
            for model, optimizer in models:
                optimizer.backward(model(x).mean())
            for _, optimizer in models:
                optimizer.step()
                drawn.append(torch.rand(2))
            update, shard = divmod(number, shards)
            torch.manual_seed(shard_seed(train_several.SEED, shard, update))
            assert all(torch.equal(each, torch.rand(2)) for each in drawn)
    extra = store.load(store.newest(tmp_path / "run/checkpoints")).meta["extra"]
    assert extra[RANDOM_SHARDS] == shards, "a job of other shards draws other numbers"


def test_the_ranks_agree_on_the_models_that_an_update_has_trained(tmp_path, monkeypatch):
    agree, told = Agreement.agree, []

    def agreed(self, requests, place, metrics):
        told.append(place.models)
        return agree(self, requests, place, metrics)

    monkeypatch.setattr(Agreement, "agree", agreed)
    trained(tmp_path / "run", "critic", *SOLO, updates=4)
    assert told == [("D",), ("D",), ("G", "D"), ("D",)]


def test_a_part_of_a_stream_is_refused_where_shards_are_not_ranks(tmp_path):
    with rank_of(tmp_path / "run", *SOLO, "cluster.shards=2"), mtrain.session() as session:
        session.prepare(lambda: torch.nn.Linear(6, 1), optimizer=train_several.adam)
        with pytest.raises(ScriptError, match="shard= given, which divides a stream among the 1 ranks of this job"):
            session.batches(None, shard=lambda rank, size: train_several.Noisy(), global_batch=4, updates=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_fsdp_the_loss_of_a_generator_leaves_no_gradients_in_its_discriminator(tmp_path, monkeypatch):
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": held_port()}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    ours, theirs = trained(tmp_path / "run", "gan", "backend.name=fsdp").state.weights, plain_weights("gan")
    assert largest_difference(ours, theirs) <= 1e-12
