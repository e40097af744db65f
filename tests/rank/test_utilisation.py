"""MFU: which peak counts, and the share of it that the model's operations take."""

from dataclasses import dataclass
from typing import Any

import pytest

from mtrain.core.interfaces import Capabilities
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
    capabilities: Capabilities


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
    session = Session(Ranks(0, 4), Capabilities(operations=lambda plugin, task, rows, frozen: rows * 3 * 10**12))
    made = Utilisation(session, None, None, peak_tflops=100.0, frozen=[])  # type: ignore[arg-type]
    assert made.of({"samples_per_second": 40.0}) == {"mfu": pytest.approx(0.3)}


@pytest.mark.parametrize(
    ("count", "peak", "rank"),
    [(None, 100.0, 0), (lambda *_: None, 100.0, 0), (lambda *_: 5, None, 0), (lambda *_: 5, 100.0, 1)],
    ids=["no count", "another model", "no peak", "another rank"],
)
def test_nothing_is_shown_where_it_is_not_known(count, peak, rank):
    session = Session(Ranks(rank, 4), Capabilities(operations=count))
    made = Utilisation(session, None, None, peak_tflops=peak, frozen=[])  # type: ignore[arg-type]
    assert made.of({"samples_per_second": 40.0}) == {}


def test_a_model_that_cannot_be_counted_trains_all_the_same(caplog):
    def count(*_: object) -> int:
        raise AttributeError("no values here")

    made = Utilisation(Session(Ranks(0, 1), Capabilities(operations=count)), None, None, peak_tflops=1.0, frozen=[])  # type: ignore[arg-type]
    assert made.of({"samples_per_second": 40.0}) == {}
    assert "no mfu is recorded" in caplog.text
