"""A model of which each rank builds its part has the bits of one that is built whole."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from mtrain.backends._torch.sharded import spread
from mtrain.backends.torch_engine import LocalCollective
from tests.backends.processes import ROOT

MODELS = ("own", "shared", "loaded", "llama", "gpt2")


def _prepared(backend: str, *, ranks: int, models: tuple[str, ...] = MODELS, code: int = 0) -> list[str]:
    """Build models of ``spread_ranks`` on real ranks, which end with ``code``; return what each rank has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.backends.spread_ranks", backend, *models],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        shown = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * ranks, "\n".join(shown)
    return shown


@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("fsdp", 2),
        pytest.param("deepspeed", 2, marks=pytest.mark.slow),
        *[pytest.param(name, count, marks=pytest.mark.slow) for name in ("fsdp", "deepspeed") for count in (3, 4)],
    ],
)
def test_ranks_start_from_the_bits_of_a_plain_build(backend: str, ranks: int) -> None:
    """Models of transformers and an own one, in float32 and float64; FSDP's parts are of unequal length."""
    for shown in _prepared(backend, ranks=ranks, models=(*MODELS, "own optimizer")):
        same = [line.split()[1:] for line in shown.splitlines() if line.startswith("same ")]
        assert same == [[name, double] for name in MODELS for double in ("False", "True")]
        assert "refused load_state_dict: the whole array layers.0.weight" in shown


@pytest.mark.slow
def test_a_scripts_own_optimizer_starts_on_the_parts_of_replicas() -> None:
    for shown in _prepared("fsdp:replicate=2", ranks=4, models=("own optimizer",)):
        assert "refused load_state_dict: the whole array layers.0.weight" in shown


@pytest.mark.job
@pytest.mark.parametrize(
    ("mesh", "ranks", "models"),
    [
        ("tensor=2", 2, ("even", "tied")),
        ("pipeline=2", 2, ("odd", "tied")),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("tensor=2:sequence", 2, ("odd", "lora")),
                ("tensor=2", 4, ("even", "odd", "tied", "lora")),
                ("replicate=2:tensor=2", 4, ("even", "tied")),
                ("pipeline=2:tensor=2", 4, ("even", "odd", "tied", "lora")),
                ("pipeline=2:tensor=2:sequence", 4, ("even", "tied")),
                ("pipeline=2", 4, ("even", "tied")),
            )
        ],
    ],
)
def test_ranks_of_a_mesh_start_from_the_bits_of_a_plain_build(mesh: str, ranks: int, models: tuple[str, ...]) -> None:
    """Language models, in float32 and float64; of weights, few are whole at a time."""
    for shown in _prepared(f"fsdp:{mesh}", ranks=ranks, models=models):
        same = [line.split()[1:] for line in shown.splitlines() if line.startswith("same ")]
        assert same == [[name, double] for name in models for double in ("False", "True")]


@pytest.mark.slow
def test_what_one_rank_alone_prints_of_a_model_ends_all_ranks() -> None:
    """None waits for another one that does something else."""
    for shown in _prepared("fsdp", ranks=2, models=("uneven",), code=1):
        assert "what one rank alone computes or prints of them" in shown.splitlines()[-1]


class _Other(LocalCollective):
    """This rank of two, whose other one has built what ``_agree`` is told."""

    def __init__(self, answers: list[str]) -> None:
        self.size = 2  # type: ignore[misc]
        self.answers = answers

    def all_gather(self, value: Any) -> list[Any]:
        return [self.answers.pop(0) if self.answers else value, value]


def test_ranks_that_build_different_weights_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.errors import TrainingError

    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    made = spread.Spread(_Other(["another"]), torch.device("cpu"))
    with made:
        model = nn.Linear(30, 30)
    with pytest.raises(TrainingError, match=r"ranks 1 start from other weights than rank 0.* or prints of them"):
        made.check_equal_start(model)


def test_no_more_than_the_room_and_the_newest_array_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 3 * 4000)
    with spread.Spread(_Other([]), torch.device("cpu")):
        layers = nn.ModuleList(nn.Linear(10, 100, bias=False) for _ in range(9))
    sizes = [layer.weight.untyped_storage().nbytes() for layer in layers]  # type: ignore[union-attr]
    assert sizes == [0] * 6 + [4000] * 3


def test_memory_that_numpy_has_seen_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 0)
    with spread.Spread(_Other([]), torch.device("cpu")):
        first = torch.full((100,), 2.0)
        seen = first.numpy()
        torch.zeros(100)
        torch.zeros(100)
    assert seen.sum() == 200
    assert first.untyped_storage().nbytes() == 400


class _Named(torch.Tensor):
    """A class of tensors that adds nothing but its name."""


@pytest.mark.parametrize(
    "read",
    [
        lambda x, _: repr(x).count("2."),
        lambda x, _: f"{x}".count("2."),
        lambda x, _: repr(nn.Parameter(x)).count("2."),
        lambda _, named: int(named.sum()) // 2,
    ],
    ids=["repr", "format", "repr of a parameter", "a class of its own"],
)
def test_arrays_are_whole_for_what_a_constructor_reads(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading memory that was given up would end the process."""
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 0)
    with spread.Spread(LocalCollective(), torch.device("cpu")) as made:
        x = torch.full((100,), 2.0)
        named = x.as_subclass(_Named)
        torch.zeros(100)
        assert made.is_spread(x)
        assert read(x, named) == 100
        torch.zeros(100)
        assert made.is_spread(x), "it is shown, and not kept whole"


def test_an_array_that_was_resized_keeps_all_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 0)
    with spread.Spread(LocalCollective(), torch.device("cpu")) as made:
        x = torch.full((100,), 2.0)
        x.resize_(200).fill_(3)
        torch.zeros(100)
        assert made.is_spread(x)
        assert float(x.sum()) == 600


def test_what_another_array_is_overwritten_with_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 0)
    with spread.Spread(LocalCollective(), torch.device("cpu")) as made:
        source, target = torch.full((100,), 2.0), torch.zeros(100)
        torch.zeros(100)
        assert made.is_spread(source)
        target.copy_(source)
        target[50:].copy_(target[:50])
        torch.zeros(100)
        assert made.is_spread(target)
        assert float(target.sum()) == 200


def test_a_digest_is_taken_anew_where_values_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking it costs more than giving memory up, so reading does not lead to it."""
    monkeypatch.setattr(spread, "LEAST_BYTES", 64)
    monkeypatch.setattr(spread, "ROOM_BYTES", 0)
    with spread.Spread(LocalCollective(), torch.device("cpu")) as made:
        x = torch.full((100,), 2.0)
        torch.zeros(100)
        memory = made._of(x)
        assert memory is not None
        first, memory.digest = memory.digest, "as it was"
        x.sum()
        torch.zeros(100)
        assert made.is_spread(x)
        assert memory.digest == "as it was"
        x.view(10, 10)[3].mul_(2)
        torch.zeros(100)
        assert made.is_spread(x)
        assert memory.digest not in (first, "as it was")
