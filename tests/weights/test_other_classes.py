"""Published weights are what people start from: every family takes those of another number of classes, but for its heads."""

import re

import numpy as np
import pytest

from mtrain.core.interfaces import Array
from mtrain.spec import plugins
from mtrain.weights.matching import EntryType, match
from mtrain.weights.outline import Question, outlines
from mtrain.weights.reading import Weights
from tests.weights import golden

HEADS = {
    "yolov5s": r"^model\.24\.m\.\d\.(weight|bias)$",
    "ppyoloe_s": r"^yolo_head\.pred_cls\.\d\.(weight|bias)$",
    "ppyoloe_plus_s": r"^yolo_head\.pred_cls\.\d\.(weight|bias)$",
    "vit_tiny": r"^head\.(weight|bias)$",
    "resnet18": r"^fc\.(weight|bias)$",
    "unet": r"^classifier\.(weight|bias)$",
    "liteseg": r"^(classifier|auxiliary)\.(weight|bias)$",
}
"""A model of each family -> the entries that depend on the classes, by the network's description and not by the code."""
THERE, HERE = 7, 3


@pytest.fixture(scope="module")
def states() -> dict[tuple[str, int], dict[str, EntryType]]:
    questions = [Question(model=model, classes=count, image_size=64) for model in HEADS for count in (THERE, HERE)]
    keys = [(question.model, question.classes) for question in questions]
    found = {key: outline for key, outline in zip(keys, outlines(questions), strict=True) if outline is not None}
    assert set(found) == set(keys)
    return found


def held(state: dict[str, EntryType]) -> dict[str, Array]:
    """A file with arrays of these shapes, each filled with a number of its own."""
    return {name: np.full(entry.shape, i % 100, entry.dtype) for i, (name, entry) in enumerate(state.items())}


@pytest.mark.parametrize("model", HEADS)
def test_all_but_the_heads_is_taken_and_what_is_left_out_is_one_line(states, model):
    arrays, here = held(states[model, THERE]), states[model, HERE]
    published = plugins.load("models", model).published
    file = Weights(path=golden.DATA / "file.pt", arrays=arrays, layout="torch", description="a test")
    found = match(file, here, published)
    heads = {name for name in here if re.search(HEADS[model], name)}
    assert set(found.of_classes) == heads != set()
    assert found.reshaped == found.missing == found.unused == found.inexact == []
    never = {name for name in here if any(re.search(pattern, name) for pattern in published.left_out)}
    assert set(found.matched) == set(here) - heads - (never - set(arrays))
    assert all(np.array_equal(array, arrays[name]) for name, array in found.matched.items())
    (line,) = found.warnings()
    assert "\n" not in line
    assert line.startswith(f"the number of classes differs, so the head keeps its start values ({len(heads)} arrays): ")
    assert all(f"{arrays[name].shape} there, {here[name].shape} here" in line for name in found.of_classes[:4])
