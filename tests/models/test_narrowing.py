"""Detections of outputs that were narrowed on the device are those of whole outputs. Under both frameworks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.core.evaluate import narrowing, outputs
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from tests.framework import Framework

B, N, C = 3, 1500, 4


def outputs_of(model: str, share: float, *, ties: bool = False) -> dict[str, np.ndarray]:
    """Output of a model in which about ``share`` of the scores are above the threshold; image 0 has no high score."""
    random = np.random.default_rng(7)
    high = random.random((B, N, C)) < share
    scores = np.where(high, random.random((B, N, C)), random.random((B, N, C)) * 5e-4)
    if ties:
        scores = np.round(scores, 1)
    scores[0] = 0
    centre, size = random.random((B, N, 2)) * 600, random.random((B, N, 2)) * 40 + 1
    if model == "ppyoloe_s":
        found = {"boxes": np.concatenate((centre - size / 2, centre + size / 2), 2), "scores": scores}
    else:
        found = {"decoded": np.concatenate((centre, size, random.random((B, N, 1)), scores), 2)}
    return {name: array.astype(np.float32) for name, array in found.items()}


@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_s"])
@pytest.mark.parametrize(("share", "ties"), [(0.0, False), (0.01, False), (0.6, True)])
def test_detections_are_equal_and_less_is_downloaded(
    framework: Framework, model: str, share: float, ties: bool
) -> None:
    plugin = plugins.load("models", model)(Registry.read().options("models", model, {}, path=""))
    whole = outputs_of(model, share, ties=ties)
    on_device = {name: framework.tensor(array) for name, array in whole.items()}
    narrow = {name: framework.ops.to_numpy(x) for name, x in plugin.narrowed(on_device).items()}
    expected, actual = plugin.predictions(whole, {}), plugin.predictions(narrow, {})
    assert len(expected) == B
    assert len(expected[0]) == 0
    assert share == 0 or len(expected[1]) > 10
    for one, other in zip(expected, actual, strict=True):
        assert one.tobytes() == other.tobytes()
    if share < 0.5:
        assert sum(x.nbytes for x in narrow.values()) < 0.2 * sum(x.nbytes for x in whole.values())


def test_scores_that_are_no_numbers_push_out_nothing(framework: Framework) -> None:
    plugin = plugins.load("models", "ppyoloe_s")(Registry.read().options("models", "ppyoloe_s", {}, path=""))
    whole = outputs_of("ppyoloe_s", 0.01)
    whole["scores"][1, :700] = np.nan
    narrow = {
        n: framework.ops.to_numpy(x)
        for n, x in plugin.narrowed({n: framework.tensor(x) for n, x in whole.items()}).items()
    }
    for one, other in zip(plugin.predictions(whole, {}), plugin.predictions(narrow, {}), strict=True):
        assert one.tobytes() == other.tobytes()


class Session:
    """As much of a session as an evaluation asks for."""

    def __init__(self, device: str) -> None:
        self.device, self.narrowed = device, []

    def batches(self, loader: Any) -> Any:
        return iter(loader)

    def infer(self, model: Any, batch: Any, **named: Any) -> Mapping[str, Any]:
        self.narrowed.append(named.get("narrow"))
        return {"x": batch}


@pytest.mark.parametrize(("device", "narrows"), [("cpu", False), ("cuda:1 (NVIDIA H100)", True)])
def test_outputs_are_narrowed_where_they_are_downloaded(device: str, narrows: bool) -> None:
    def narrow(output: Any) -> Any:
        return output

    session: Any = Session(device)
    assert len(list(outputs(session, None, [{}, {}], narrow=narrowing(session, narrow)))) == 2
    assert session.narrowed == [narrow if narrows else None] * 2
