"""The task `keypoints`: windows, flips, metrics, files of COCO and predictions; and mtrain's own checks."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mtrain_keypoints.coco import CocoKeypoints
from mtrain_keypoints.evaluator import PointEvaluator
from mtrain_keypoints.people import People, divided, mirrored
from mtrain_keypoints.prediction import UnlabelledImages, unlabelled
from mtrain_keypoints.section import KeypointAugmentSpec, KeypointDataSpec
from mtrain_keypoints.source import KeypointSource

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError


def read(root: Path, split: Any = "train", **options: Any) -> People:
    return CocoKeypoints(CocoKeypoints.Options(**options)).read(SplitRequest(root=root, split=split))


def section(**values: Any) -> KeypointDataSpec:
    return KeypointDataSpec(format="coco_keypoints", image_size=64, **values)


def window(source: KeypointSource, index: int, epoch: int = 0) -> tuple[np.ndarray, Any]:
    out = np.zeros((64, 64, 3), np.uint8)
    return out, source.fill(epoch, index, out)


def test_people_without_points_are_left_out_and_the_others_have_theirs(export: Path) -> None:
    split = read(export)
    assert (len(split), split.class_names) == (6, ("nose", "left_hand", "right_hand"))
    assert split.points[..., 2].all()
    assert split.image(0).shape == (48, 64, 3)


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
@pytest.mark.parametrize("augment", [None, KeypointAugmentSpec(flip_lr=1.0, degrees=40.0)])
def test_points_lie_on_their_dots_in_the_window_and_back_in_the_image(
    export: Path, resize: Any, augment: KeypointAugmentSpec | None
) -> None:
    split = read(export)
    source = KeypointSource(split, section(resize=resize), augment=augment, seed=3)
    for index in range(len(split)):
        pixels, sample = window(source, index)
        for number, (x, y) in enumerate(sample.points * 64):
            if sample.known[number]:
                colour = number if augment is None else source._swaps[number]
                assert pixels[int(y), int(x)].argmax() == colour
        back = sample.points @ sample.back[:, :2].T + sample.back[:, 2]
        truth = split.points[index, :, :2]
        assert np.allclose(back, truth if augment is None else truth[source._swaps], atol=1e-3)


def test_a_window_depends_on_seed_epoch_and_number_alone(export: Path) -> None:
    first, again = (KeypointSource(read(export), section(), augment=KeypointAugmentSpec(), seed=3) for _ in range(2))
    assert np.array_equal(window(first, 2)[0], window(again, 2)[0])
    assert not np.array_equal(window(first, 2, epoch=0)[0], window(first, 2, epoch=1)[0])


def test_a_mirror_swaps_left_and_right() -> None:
    assert mirrored(("nose", "left_eye", "right_eye", "left_horn")) == [0, 2, 1, 3]


def test_people_of_one_image_stay_together_when_a_set_is_divided(export: Path) -> None:
    split = read(export).chosen([0, 1, 1, 2, 2, 3])
    train, val = divided(split, 0.5, seed=0)
    assert len(train) + len(val) == 6
    assert not set(train.keys) & set(val.keys)


def test_found_counts_points_within_a_share_of_the_box(export: Path) -> None:
    split = read(export, "val")
    evaluator = PointEvaluator(split, near=0.1)
    size = split.boxes[:, 2:].max(axis=1)
    predicted = split.points.copy()
    predicted[0, 0, 0] += 0.2 * size[0]
    partial = dict(enumerate(predicted))
    metrics = evaluator.result([partial, {0: predicted[0]}])
    assert metrics["found"] == metrics["score"] == pytest.approx(8 / 9)
    assert metrics["error"] == pytest.approx(0.2 / 9)
    assert metrics["found/nose"] == pytest.approx(2 / 3)
    assert evaluator.remarks()[0].startswith("found least often: nose (67%)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"categories": []}, "data.options.category: null given; .* has points for no category"),
        ({"images": []}, "annotations of images that are not listed"),
        ({"images": 3}, "no annotations of keypoints: images: Input should be a valid array"),
        ({"annotations": [{"image_id": 0, "category_id": 1, "keypoints": [1, 2]}]}, "has 2 numbers; expected 9"),
    ],
)
def test_wrong_annotations_are_refused_in_a_sentence(export: Path, change: Any, message: str) -> None:
    file = export / "train.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=message):
        read(export)


def test_predictions_are_written_in_pixels_of_their_image(export: Path, tmp_path: Path) -> None:
    people = unlabelled([export / "val" / "000.png"], names=("nose", "left_hand"), max_pixels=10_000)
    data = UnlabelledImages(SimpleNamespace(data=section()), people)
    source, evaluator = data.sources()["val"], data.evaluator()
    _, sample = window(source, 0)
    batch = source.collate([sample])
    evaluator.add(batch, [np.array([[0.5, 0.5, 0.9], [0.0, 0.0, 0.1]])])
    data.write(evaluator.partial(), tmp_path, confidence=0.5, draw=True)
    (entry,) = json.loads((tmp_path / "predictions.json").read_text())
    assert (entry["class"], entry["score"], entry["x"], entry["y"]) == ("nose", 0.9, 32.0, 24.0)
    assert (tmp_path / "000.jpg").is_file()


def test_it_passes_the_checks_of_mtrain(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mtrain", "plugins", "test", "keypoints", "-o", "data.image_size=64"]
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
