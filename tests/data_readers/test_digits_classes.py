"""Digits one by one: the split, samples that depend on (seed, epoch, index) alone, accuracy, and what people are shown."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mtrain.commands.data import data
from mtrain.core.interfaces import SplitRequest
from mtrain.data.images.decode import decode
from mtrain.data.images.drawing import save_image
from mtrain.data.images.section import VariationSpec
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import DataError
from mtrain.spec.building import schema_of
from mtrain.spec.registry import Registry
from mtrain.tasks.classification.digits import DigitsClasses, DigitsClassesOptions
from mtrain.tasks.classification.drawing import comparison
from mtrain.tasks.classification.evaluator import ClassEvaluator
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.prediction import ClassImages, without_labels
from mtrain.tasks.classification.section import ClassificationAugmentSpec, ClassificationDataSpec
from mtrain.tasks.classification.source import ClassificationSource, fit_image
from mtrain.tasks.classification.task import ClassificationTask
from mtrain.tasks.datasets import OpenData

pytestmark = pytest.mark.smoke

OFF = {"translate": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "flip_lr": 0.0}


@pytest.fixture(scope="module")
def splits():
    return {split: read(split) for split in ("train", "val")}


def read(split, *, root=None, names=None, **options):
    return DigitsClasses(DigitsClassesOptions(**options)).read(SplitRequest(root=root, names=names, split=split))


def spec_of(**augment):
    schema = schema_of("classification", registry=Registry.read())
    section = ClassificationAugmentSpec(**{**OFF, **augment})
    data = ClassificationDataSpec(format="digits_classes", image_size=8, resize="letterbox", augment=section)
    return schema(data=data)


def task_of(spec=None):
    spec = spec or spec_of()
    return ClassificationTask(spec, OpenData(spec.data, DigitsClasses(), ClassificationTask))


# ------------------------------------------------------------------------------------------------------------- the split
def test_every_fifth_image_is_for_evaluation_and_all_of_the_set_is_used(splits):
    from sklearn.datasets import load_digits

    original = load_digits()
    train, val = splits["train"], splits["val"]
    assert (len(train), len(val)) == (1437, 360)
    np.testing.assert_array_equal(val.labels, original.target[::5])
    np.testing.assert_array_equal(val.images[..., 1], np.rint(original.images[::5] * 255 / 16).astype(np.uint8))
    assert set(train.origins) | set(val.origins) == {f"digit {i}" for i in range(1797)}
    assert min(train.histogram().values()) > 130
    assert train.report() == val.report() == []


def test_another_share_can_be_asked_for():
    assert len(read("val", val_every=10)) == 180
    assert len(read("train", val_every=10)) == 1797 - 180


def test_places_and_wrong_names_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data\.root: given, but digits_classes comes with scikit-learn"):
        read("train", root=tmp_path)
    with pytest.raises(DataError, match=r"data\.names: 2 given, expected 10"):
        read("train", names=["a", "b"])
    assert read("train", names=list("abcdefghij")).class_names == tuple("abcdefghij")


def test_classes_without_an_image_are_told():
    few = LabelledImages(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 2]), ("a", "b", "c"), ["x", "y"])
    assert few.report() == ["classes without an image: b"]


# --------------------------------------------------------------------------------------------------------------- samples
def test_an_augmented_sample_depends_on_seed_epoch_and_index_alone(splits):
    augment = VariationSpec(**{**OFF, "degrees": 15.0, "translate": 0.2})

    def images(seed, epoch, order):
        source = ClassificationSource(splits["train"], side=8, augment=augment, seed=seed)
        return {i: source.sample(epoch, i, update=i).image.tobytes() for i in order}

    assert images(0, 1, range(20)) == images(0, 1, reversed(range(20)))
    changed = [images(*key, range(20)) for key in ((0, 2), (1, 1))]
    assert all(sum(other[i] != images(0, 1, [i])[i] for i in range(20)) > 15 for other in changed)


def test_without_augmentation_images_are_as_they_are_and_maps_that_do_nothing_too(splits):
    plain = ClassificationSource(splits["val"], side=8)
    still = ClassificationSource(splits["val"], side=8, augment=VariationSpec(**OFF), seed=5)
    for index in range(0, 360, 40):
        np.testing.assert_array_equal(plain.sample(3, index).image, splits["val"].images[index])
        np.testing.assert_array_equal(still.sample(3, index).image, splits["val"].images[index])


def test_a_turn_is_about_the_very_centre_of_the_image():
    symmetric = np.zeros((8, 8, 3), np.uint8)
    symmetric[3:5, 3:5] = 200
    split = LabelledImages(symmetric[None], np.array([0]), ("a", "b"), ["x"])
    source = ClassificationSource(split, side=8, augment=VariationSpec(**{**OFF, "degrees": 180.0}), seed=0)
    turned = source.sample(0, 0).image.astype(float)[..., 0]
    assert (turned != symmetric[..., 0]).any()
    rows, columns = np.mgrid[:8, :8]
    assert (turned * rows).sum() / turned.sum() == pytest.approx(3.5, abs=0.02)
    assert (turned * columns).sum() / turned.sum() == pytest.approx(3.5, abs=0.02)


def test_images_of_another_size_are_fitted_or_stretched():
    wide = np.full((10, 20, 3), 200, np.uint8)
    boxed = fit_image(wide, side=8, resize="letterbox")
    assert boxed.shape == (8, 8, 3)
    assert (boxed[2:6] == 200).all()
    assert (boxed[:2] == 114).all()
    assert (fit_image(wide, side=8, resize="stretch") == 200).all()


@pytest.mark.job
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_batches_that_a_model_is_promised(workers):
    pool = WorkerPool(task_of(spec_of(degrees=10.0)).sources(), workers=workers)
    try:
        loader = pool.loader("train", lambda e, u: [np.array([5, 900, 7])], micro_batch=3, updates_per_epoch=1)
        (batch,) = loader.micro_batches(4)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            "images": ((3, 8, 8, 3), np.uint8),
            "labels": ((3,), np.int64),
            "index": ((3,), np.int64),
            "epoch": ((1,), np.int64),
        }
        source = task_of(spec_of(degrees=10.0)).sources()["train"]
        np.testing.assert_array_equal(batch["images"][1], source.sample(4, 900).image)
        assert batch["labels"].tolist() == read("train").labels[[5, 900, 7]].tolist()
        loader.close()
    finally:
        pool.close()


# ------------------------------------------------------------------------------------------------------------ evaluation
def evaluated(labels, predicted, *, ranks=1, names=("a", "b", "c")):
    """Each rank sees its share, the last one the first sample again."""
    split = LabelledImages(
        np.zeros((len(labels), 8, 8, 3), np.uint8), np.array(labels), names, [str(i) for i in range(len(labels))]
    )
    partials = []
    for rank in range(ranks):
        evaluator = ClassEvaluator(split)
        mine = [*range(rank, len(labels), ranks), *([0] if rank == ranks - 1 else [])]
        evaluator.add({"index": np.array(mine)}, [np.eye(len(names))[predicted[i]] for i in mine])
        partials.append(evaluator.partial())
    return evaluator, evaluator.result(partials)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metrics_count_each_image_once_on_any_number_of_ranks(ranks):
    evaluator, metrics = evaluated([0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2], ranks=ranks)
    assert metrics == {
        "score": pytest.approx(4 / 6),
        "accuracy": pytest.approx(4 / 6),
        "balanced_accuracy": pytest.approx((3 / 4 + 1 / 2) / 2),
        "accuracy/a": 0.75,
        "accuracy/b": 0.5,
    }
    np.testing.assert_array_equal(evaluator.confusion, [[3, 1, 0], [0, 1, 1], [0, 0, 0]])


def test_mistakes_are_told_the_most_frequent_first():
    evaluator, _ = evaluated([0, 0, 0, 1, 2], [1, 1, 0, 2, 2])
    assert evaluator.remarks() == ["mistakes: 3 of 5, most often a for b (2), b for c (1)"]
    evaluator, metrics = evaluated([0, 1], [0, 1])
    assert evaluator.remarks() == []
    assert metrics["accuracy"] == 1.0
    assert set(ClassEvaluator.headline) <= set(ClassEvaluator.metrics) <= set(metrics)


# ------------------------------------------------------------------------------------------------------------ for people
def test_mistakes_are_drawn_first_and_framed_in_red(splits):
    val = splits["val"]
    actual = {i: np.eye(10, dtype=np.float32)[val.labels[i]] for i in range(40)}
    actual[17] = np.roll(actual[17], 1)
    image = comparison(val, actual, limit=16)
    corners = [tuple(image[26, 6 + column * 124].tolist()) for column in range(2)]
    assert corners == [(220, 40, 40), (60, 160, 60)]


def test_predictions_are_written_for_files_and_below_the_confidence_left_out(splits, tmp_path):
    for index in range(3):
        save_image(splits["val"].images[index], tmp_path / f"{index}.png")
    spec = spec_of()
    images = without_labels(sorted(tmp_path.glob("*.png")), spec.data, class_names=list("0123456789"))
    np.testing.assert_array_equal(images.images, splits["val"].images[:3])
    actual = {i: np.full(10, 0.05, np.float32) for i in range(3)}
    actual[1][4], actual[2][7] = 0.55, 0.2
    ClassImages(spec, images).write(actual, tmp_path / "out", confidence=0.25, draw=True)
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [(row["file_name"], row["class"], row["label"]) for row in rows] == [(str(tmp_path / "1.png"), "4", 4)]
    assert rows[0]["score"] == pytest.approx(0.55)
    assert [decode(tmp_path / "out" / f"{i}.jpg").shape[2] for i in range(3)] == [3, 3, 3]


def test_unreadable_files_are_all_named(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2 of 2 images cannot be read:\n.*a\.png.*\n.*b\.png"):
        without_labels(sorted(tmp_path.glob("*.png")), spec_of().data, class_names=("a", "b"))


def test_data_check_prints_images_per_class_and_saves_grids(tmp_path):
    arguments = ["check", "vit_digits", "--output", str(tmp_path)]
    outcome = CliRunner().invoke(data, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    for text in (
        "1797 images, all read",
        "1437",
        "train images: 8 x 8 px, given to the network as 8 x 8",
        "every class occurs",
    ):
        assert text in outcome.output
    for kind in ("train", "val", "augmented"):
        assert decode(tmp_path / f"data_check_vit_digits_{kind}.jpg").size > 0
