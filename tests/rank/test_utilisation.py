"""MFU: which peak counts, and the share of it that the model's operations take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mtrain.rank.utilisation import Utilisation, peak_of
from mtrain.spec.model import Spec


def spec(**report: Any) -> Spec:
    return Spec.model_validate(
        {"model": {"name": "hf"}, "data": {"format": "text"}, "train": {"updates": 1}, "report": report}
    )


@dataclass
class Ranks:
    rank: int
    size: int


@dataclass
class Session:
    collective: Ranks


class Counted:
    """A model whose operations ``count`` says."""

    def __init__(self, count: Callable[[int], int | None]) -> None:
        self._count = count

    def operations(self, task: object, *, rows: int, frozen: object) -> int | None:
        return self._count(rows)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("cuda:0 (NVIDIA A100-SXM4-80GB)", 312.0),
        ("cuda:1 (NVIDIA H100 80GB HBM3)", 989.0),
        ("cuda:1 (NVIDIA H100 PCIe)", 756.0),
        ("cuda:0 (NVIDIA H200)", 989.0),
        ("cuda:0 (NVIDIA H200 NVL)", 835.0),
        ("cuda:0 (NVIDIA H100 80GB HBM3 MIG 1g.10gb)", None),
        ("cuda:0 (NVIDIA GeForce RTX 3060)", None),
        ("cpu", None),
    ],
)
def test_the_published_peak_counts_for_bf16_on_devices_that_are_known(device, peak):
    assert peak_of(spec(), precision="bf16", device=device) == peak
    assert peak_of(spec(), precision="fp32", device=device) is None
    assert peak_of(spec(peak_tflops=20), precision="fp32", device=device) == 20.0


def test_it_is_the_share_of_the_peak_of_all_devices():
    model: Any = Counted(lambda rows: rows * 3 * 10**12)
    session: Any = Session(Ranks(0, 4))
    made = Utilisation(session, model, None, peak_tflops=100.0, frozen=[])
    assert made.of({"samples_per_second": 40.0}) == {"mfu": pytest.approx(0.3)}


@pytest.mark.parametrize(
    ("count", "peak", "rank"),
    [(lambda rows: None, 100.0, 0), (lambda rows: 5, None, 0), (lambda rows: 5, 100.0, 1)],
    ids=["another model", "no peak", "another rank"],
)
def test_nothing_is_shown_where_it_is_not_known(count, peak, rank):
    model: Any = Counted(count)
    session: Any = Session(Ranks(rank, 4))
    made = Utilisation(session, model, None, peak_tflops=peak, frozen=[])
    assert made.of({"samples_per_second": 40.0}) == {}


def test_a_model_that_cannot_be_counted_trains_all_the_same(caplog):
    def count(*_: object) -> int:
        raise AttributeError("no values here")

    model: Any = Counted(count)
    session: Any = Session(Ranks(0, 1))
    made = Utilisation(session, model, None, peak_tflops=1.0, frozen=[])
    assert made.of({"samples_per_second": 40.0}) == {}
    assert "no mfu is recorded" in caplog.text
