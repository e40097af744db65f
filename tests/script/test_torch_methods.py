"""Methods, attributes and names of a script's model are those of its class on every backend, and its methods compute as ever."""

import json
import sys
from pathlib import Path

import pytest
from torch import nn

from mtrain.backends._torch.sharded.methods import own_methods
from mtrain.core.checkpoint import store
from tests.ports import held_port
from tests.script.in_process import rank_of
from tests.script.runs import SCRIPTS, done, largest_difference, weights

sys.path.insert(0, str(SCRIPTS))
import train_methods

SCRIPT = str(SCRIPTS / "train_methods.py")
RANKS = {
    "ddp-2": ("-b", "ddp", "--nproc-per-node", "2"),
    "fsdp-3": ("-b", "fsdp", "--nproc-per-node", "3"),
    "zero1-2": ("-b", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=1"),
    "zero3-2": ("-b", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
    "horovod-2": ("-b", "horovod", "--nproc-per-node", "2"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": held_port()}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))


def trained(folder: Path, monkeypatch, mode: str, *overrides: str) -> tuple[dict, list]:
    monkeypatch.setattr(sys, "argv", ["train_methods.py", mode, "--accumulate", "2"])
    with rank_of(folder, *overrides):
        train_methods.main()
    return store.load(store.newest(folder / "checkpoints")).state.weights, json.loads(Path("texts.json").read_text())


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("mode", ["method", "value", "both", "direct"])
def test_methods_train_and_generate_what_they_do_without_a_backend(tmp_path, monkeypatch, backend, mode):
    expected, texts = trained(
        tmp_path / "solo", monkeypatch, mode, "backend.name=solo", "backend.options.framework=torch"
    )
    ours, own_texts = trained(tmp_path / "run", monkeypatch, mode, f"backend.name={backend}")
    assert largest_difference(ours, expected) <= 1e-12
    assert own_texts == texts


@pytest.mark.job
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        pytest.param("ddp-2", "both", marks=pytest.mark.smoke),
        ("zero3-2", "both"),
        *(pytest.param(ranks, mode, marks=pytest.mark.slow) for ranks in RANKS for mode in ("method", "value")),
    ],
)
def test_several_ranks_train_by_methods_what_one_rank_trains(tmp_path, monkeypatch, ranks, mode):
    done(tmp_path, "--name", "many", *RANKS[ranks], SCRIPT, mode, "--accumulate", "2")
    many, texts = weights(tmp_path, "many"), json.loads(Path("texts.json").read_text())
    one, own_texts = trained(
        tmp_path / "one", monkeypatch, mode, "backend.name=solo", "backend.options.framework=torch"
    )
    assert largest_difference(many, one) <= 1e-12
    assert texts == own_texts[::2] or texts == own_texts


def test_methods_of_torch_and_private_ones_are_no_own_methods():
    class Parent(nn.Module):
        def forward(self): ...
        def train(self, mode=True): ...
        def decode(self): ...
        def _init_weights(self): ...

    class Child(Parent):
        def encode(self): ...
        @staticmethod
        def default(): ...
        @property
        def width(self): ...

    assert sorted(own_methods(Child())) == ["decode", "encode"]
    assert own_methods(nn.Sequential(nn.Linear(2, 2))) == []
