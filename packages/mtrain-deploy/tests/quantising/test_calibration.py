"""What ranges are measured from: images of the training split, as evaluation prepares them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mtrain.errors import DataError
from mtrain.spec import config
from mtrain_deploy.exported.metadata import Input, Metadata
from mtrain_deploy.quantising.calibration import feeds, samples

SIDE = 32
TRAIN, VAL = 12, 5


@pytest.fixture
def spec(tmp_path: Path) -> object:
    """A folder whose training images have the values 10 to 21, and whose others have 200."""
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            file = tmp_path / split / ("cat" if number % 2 else "dog") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            value = 10 + number if split == "train" else 200
            Image.fromarray(np.full((SIDE, SIDE, 3), value, np.uint8)).save(file)
    overrides = [f"data.root={tmp_path}", f"data.image_size={SIDE}"]
    return config.load("resnet18_folder", overrides=overrides, environ={}).job


def metadata(names: tuple[str, ...] = ("cat", "dog"), *, batch: int | str = "batch", side: int = SIDE) -> Metadata:
    return Metadata(
        mtrain="1",
        kind="classification",
        model="resnet18",
        options={},
        class_names=names,
        image_size=side,
        inputs=(Input(name="x", key="images", dtype="uint8", shape=(batch, side, side, 3), layout="NHWC"),),
        outputs={},
        form="decoded",
        precision="fp32",
        spec={},
    )


def values(batches: object) -> list[int]:
    result = []
    for batch in batches:  # type: ignore[attr-defined]
        assert batch["images"].shape[:3] == (1, SIDE, SIDE)
        assert batch["images"].min() == batch["images"].max()  # evaluation changes no colours
        result.append(int(batch["images"].max()))
    return result


def test_ranges_are_measured_on_images_of_the_training_split_each_once(spec: object) -> None:
    drawn = values(samples(spec, metadata(), count=8, seed=0))  # type: ignore[arg-type]
    assert len(set(drawn)) == 8
    assert set(drawn) <= set(range(10, 10 + TRAIN))
    assert drawn == values(samples(spec, metadata(), count=8, seed=0))  # type: ignore[arg-type]
    assert drawn != values(samples(spec, metadata(), count=8, seed=1))  # type: ignore[arg-type]
    assert sorted(values(samples(spec, metadata(), count=99, seed=0))) == list(range(10, 10 + TRAIN))  # type: ignore[arg-type]


def test_classes_of_another_order_are_refused(spec: object) -> None:
    with pytest.raises(DataError, match="classes"):
        samples(spec, metadata(("dog", "cat")), count=1, seed=0)  # type: ignore[arg-type]


def test_a_fixed_batch_is_filled_with_the_sample(spec: object) -> None:
    (feed,) = feeds(samples(spec, metadata(), count=1, seed=0), metadata(batch=3))  # type: ignore[arg-type]
    assert feed["x"].shape == (3, SIDE, SIDE, 3)
    assert len(set(feed["x"].ravel().tolist())) == 1
    with pytest.raises(DataError, match=r"data\.image_size to 64"):
        next(feeds(samples(spec, metadata(), count=1, seed=0), metadata(side=64)))  # type: ignore[arg-type]
