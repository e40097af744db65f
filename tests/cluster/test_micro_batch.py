"""``train.max_micro_batch: auto``: decided once by trials, written into the run, kept by a resumed one, refused where it means nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.errors import SpecError
from mtrain.jobs import job
from mtrain.jobs.plan import micro_batch
from mtrain.jobs.plan.micro_batch import Trials
from mtrain.jobs.plan.plan import make_plan
from mtrain.rank.spec.assembly import check_settled
from mtrain.spec import bounds, config
from mtrain.spec.config import Loaded

MIB = 1 << 20
SPEC = {
    "report.tensorboard": False,
    "report.plots": False,
    "report.display": "quiet",
    "evaluate.enabled": False,
    "train.epochs": None,
    "train.updates": 2,
    "train.batch_size": 24,
    "train.max_micro_batch": "auto",
    "data.image_size": 128,
    "backend.name": "solo",
    "cluster.threads": 1,
}


def loaded_spec(folder: Path, **more: Any) -> Loaded:
    return config.load("unet_digits", flags={**SPEC, "report.dir": str(folder), **more}, environ={})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free memory of this host."""
    return lambda count: monkeypatch.setattr(bounds, "available_bytes", lambda: count)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro batches of trials, which need 100 MiB and 10 for each sample."""
    tried: list[int] = []

    def measure(_: Any, micro: int, folder: Path) -> int:
        tried.append(micro)
        return (100 + 10 * micro) * MIB

    monkeypatch.setattr(Trials, "measure", measure)
    return tried


def settled(loaded: Loaded, folder: Path) -> Loaded:
    plan = make_plan(loaded, run_dir=folder / "run")
    return micro_batch.settle(loaded, plan, note=lambda text: None)


def test_the_number_and_its_reason_are_in_the_spec(
    tmp_path: Path, free: Callable[[int], None], measured: list[int]
) -> None:
    free(300 * MIB)
    decided = settled(loaded_spec(tmp_path), tmp_path)
    assert decided.spec.train.max_micro_batch == decided.values["train"]["max_micro_batch"] == 12
    assert measured == [1, 2, 4, 8]
    assert "12 of the 24 samples of a rank in an update fit at once (24 would be too many" in decided.notes[-1]
    assert "limit 240 MiB, 80% of the 300 MiB that are free here, for 1 rank), so accumulate is 2" in decided.notes[-1]
    assert decided.spec.train.batch_size == 24
    assert settled(decided, tmp_path) is decided


def test_ranks_of_a_host_share_its_memory_and_the_fullest_host_decides(
    tmp_path: Path, free: Callable[[int], None], measured: list[int]
) -> None:
    free(500 * MIB)
    two = loaded_spec(tmp_path, **{"backend.name": "ddp", "cluster.nproc_per_node": 2})
    plan = make_plan(two, run_dir=tmp_path / "run")
    trials = micro_batch.run_trials(two, plan, note=lambda text: None)
    assert trials.choice().micro_batch == 6  # of 12: 200 MiB for each rank
    trials.also_on([900 * MIB, 330 * MIB])
    assert trials.choice().micro_batch == 3
    assert "132 MiB, 80% of the 330 MiB that are free on the fullest of 3 hosts, for 2 ranks" in trials.budget_words()


@pytest.mark.parametrize(
    ("more", "free_mib", "message"),
    [
        ({"train.accumulate": 2}, 300, "auto given with train.accumulate: 2, which decides the micro batch itself"),
        ({}, 120, "no micro batch fits: limit 96 MiB"),
    ],
)
def test_what_cannot_be_decided_is_refused(
    tmp_path: Path,
    free: Callable[[int], None],
    measured: list[int],
    more: dict[str, Any],
    free_mib: int,
    message: str,
) -> None:
    free(free_mib * MIB)
    with pytest.raises(SpecError, match=message):
        settled(loaded_spec(tmp_path, **more), tmp_path)


def test_ranks_do_not_train_before_it_is_decided_and_a_plan_says_that_it_is_open(tmp_path: Path) -> None:
    loaded = loaded_spec(tmp_path)
    with pytest.raises(SpecError, match="auto is decided where `mtrain train` starts a job"):
        check_settled(loaded.spec)
    plan = make_plan(loaded, run_dir=tmp_path / "run")
    assert "measured when the run starts" in plan.text()


@pytest.mark.slow
def test_real_trials_decide_and_a_resumed_run_keeps_what_was_decided(
    tmp_path: Path, free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    free(500 * MIB)  # a limit of 400: on torch a rank of one sample needs 310, and 15 for each further one
    first = job.train(loaded_spec(tmp_path))
    spec = json.loads((first.run_dir / "spec.json").read_text())
    chosen = spec["train"]["max_micro_batch"]
    print(capsys.readouterr().err)
    assert 2 <= chosen < 24
    assert spec["train"]["batch_size"] == 24
    free(100_000 * MIB)
    again = job.train(loaded_spec(tmp_path, **{"train.updates": 3}), resume=str(first.run_dir))
    resumed = json.loads((again.run_dir / "spec.json").read_text())
    assert (resumed["train"]["max_micro_batch"], resumed["train"]["updates"]) == (chosen, 3)
    assert "tries" not in capsys.readouterr().err
