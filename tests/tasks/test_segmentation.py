"""Segmentation: masks read and refused in words, samples as functions of their numbers, metrics equal to plain counting."""

import ast
import json
import pickle
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import mtrain
from mtrain.core.interfaces import SplitRequest
from mtrain.core.ranks.serialization import pack, unpack
from mtrain.data.images.digits_canvas import UNCERTAIN, canvas
from mtrain.data.images.header import ImageError
from mtrain.data.images.indexed import IGNORED, colours, read_indices, write_indices
from mtrain.errors import DataError
from mtrain.models.common import segmenter
from mtrain.spec.config import load
from mtrain.tasks.datasets import open_data
from mtrain.tasks.segmentation.drawing import comparison, inputs_grid, masks_grid, overlay
from mtrain.tasks.segmentation.evaluator import MaskEvaluator
from mtrain.tasks.segmentation.fitting import back, fit_image, lay, lay_mask
from mtrain.tasks.segmentation.masks import count_pixels
from mtrain.tasks.segmentation.prediction import SegmentationImages, without_labels
from mtrain.tasks.segmentation.readers.digits_masks import NAMES, DigitsMasks, DigitsMasksOptions
from mtrain.tasks.segmentation.readers.voc_masks import VocMasks
from mtrain.tasks.segmentation.section import SegmentationAugmentSpec
from mtrain.tasks.segmentation.source import SegmentationSource
from mtrain.tasks.segmentation.task import SegmentationTask
from tests.data_readers.hostile_sets import enormous_png
from tests.sources import nodes

FEW = DigitsMasksOptions(train=4, val=3)
PACKAGE = Path(mtrain.__file__).parent


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("masks") / "digits"
    DigitsMasks(FEW).read(SplitRequest(root=folder, split="train"))
    return folder


@pytest.fixture(scope="module")
def val(digits):
    return VocMasks().read(SplitRequest(root=digits, split="val"))


@pytest.fixture
def voc(tmp_path) -> Path:
    """Three images of 30 x 20 in the folders of Pascal VOC; ``train`` has two, ``val`` one."""
    rng = np.random.default_rng(0)
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (tmp_path / "JPEGImages").mkdir()
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
        mask = rng.integers(0, 21, (20, 30), np.uint8)
        mask[:3] = IGNORED
        write_indices(mask, tmp_path / "SegmentationClass" / f"{name}.png")
    (lists / "train.txt").write_text("a\nb\n")
    (lists / "val.txt").write_text("c\n")
    return tmp_path


def read(root, split="train", **options):
    return VocMasks(VocMasks.Options(**options)).read(SplitRequest(root=root, split=split))


# ------------------------------------------------------------------------------------------------------------- the files
def test_no_module_of_the_task_imports_another_task():
    for file in sorted((PACKAGE / "tasks" / "segmentation").rglob("*.py")):
        for node in nodes(file):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(("mtrain.tasks.detection", "mtrain.tasks.class"))], (
                file
            )


def test_indices_and_palette_are_those_of_pascal_voc(tmp_path):
    assert colours()[[0, 1, 2, 3, 15, 20, 255]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192],
    ]  # fmt: skip
    indices = np.arange(256, dtype=np.uint8).reshape(8, 32)
    write_indices(indices, tmp_path / "out" / "m.png")
    np.testing.assert_array_equal(read_indices(tmp_path / "out" / "m.png"), indices)
    with Image.open(tmp_path / "out" / "m.png") as image:
        assert image.mode == "P"
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), colours()[indices])
    Image.fromarray(indices).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_indices(tmp_path / "grey.png"), indices)


def test_images_and_masks_of_a_split_are_found_with_their_classes(voc):
    train = read(voc)
    assert [path.name for path in train.images] == ["a.jpg", "b.jpg"]
    assert train.class_names[:2] == ("background", "aeroplane")
    assert len(train.class_names) == 21
    assert train.image(0).shape == (20, 30, 3)
    assert (train.mask(0, (30, 20))[:3] == IGNORED).all()
    assert len(read(voc, "all")) == 3
    (voc / "classes.txt").write_text("\n".join(f"c{i}" for i in range(30)))
    assert read(voc).class_names[29] == "c29"
    named = VocMasks().read(SplitRequest(root=voc, names=[str(i) for i in range(22)], split="val"))
    assert named.class_names[21] == "21"


def test_counting_tells_how_many_pixels_each_class_has(voc):
    train = read(voc)
    pixels = np.concatenate([train.mask(i, (30, 20)).ravel() for i in range(2)])
    expected = [*(np.count_nonzero(pixels == label) for label in range(21)), np.count_nonzero(pixels == 255)]
    assert count_pixels(train).tolist() == expected


def test_a_set_is_divided_by_names_alone(voc):
    whole = read(voc, "all")
    train, held = whole.divide(0.34, seed=0)
    _, turned_held = whole.choose([2, 0, 1]).divide(0.34, seed=0)
    assert set(train.keys) | set(held.keys) == {"a", "b", "c"}
    assert len(held) == 1
    assert set(turned_held.keys) == set(held.keys)
    assert len({tuple(whole.divide(0.34, seed=seed)[1].keys) for seed in range(9)}) > 1
    with pytest.raises(DataError, match="1 images cannot be divided"):
        read(voc, "val").divide(0.5, seed=0)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


HOSTILE = {
    "mask of another size": (
        lambda root: write_indices(np.zeros((30, 20), np.uint8), root / "SegmentationClass/a.png"),
        r"a\.png: a mask of 20 x 30 pixels, but a\.jpg has 30 x 20",
    ),
    "mask missing": (lambda root: (root / "SegmentationClass/b.png").unlink(), r"1 files of 2 names are missing:\n  b: no mask"),
    "image missing": (lambda root: (root / "JPEGImages/b.jpg").unlink(), r"b: no image in"),
    "mask cut short": (lambda root: damaged(root / "SegmentationClass/a.png"), r"a\.png: not a readable mask \("),
    "mask empty": (lambda root: (root / "SegmentationClass/a.png").write_bytes(b""), r"a\.png: not a readable mask \(empty file\)"),
    "mask is text": (lambda root: (root / "SegmentationClass/a.png").write_text("mask"), r"a\.png: not a readable mask"),
    "index out of range": (
        lambda root: write_indices(np.full((20, 30), 21, np.uint8), root / "SegmentationClass/a.png"),
        r"a\.png: class index 21 for 21 classes; expected 0 to 20, or 255",
    ),
    "mask in colour": (
        lambda root: Image.new("RGB", (30, 20)).save(root / "SegmentationClass/a.png"),
        r"a\.png: an image of the kind RGB, expected class indices",
    ),
    "enormous mask": (
        lambda root: (root / "SegmentationClass/a.png").write_bytes(enormous_png(60_000, 60_000)),
        r"a\.png: 60000 x 60000 pixels are 3600 million, more than the 120 million",
    ),
    "enormous image": (
        lambda root: (root / "JPEGImages/a.jpg").write_bytes(enormous_png(60_000, 60_000)),
        r"a\.jpg: 60000 x 60000 pixels are 3600 million",
    ),
    "image damaged": (lambda root: damaged(root / "JPEGImages/a.jpg"), r"a\.jpg: truncated JPEG"),
    "name twice": (
        lambda root: (root / "ImageSets/Segmentation/train.txt").write_text("a\na\n"),
        r"names of images must be unique",
    ),
    "name outside": (lambda root: (root / "ImageSets/Segmentation/train.txt").write_text("../../a\n"), r"\.\./\.\./a: no image"),
    "no list": (lambda root: (root / "ImageSets/Segmentation/train.txt").unlink(), r"data\.train: no list of the train split found"),
    "too many classes": (lambda root: (root / "classes.txt").write_text("x\n" * 300), r"300 classes; expected 1 to 255"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_used_is_refused_in_one_error_that_names_the_file(voc, name):
    spoil, message = HOSTILE[name]
    spoil(voc)
    with pytest.raises(DataError, match=message) as caught:
        count_pixels(read(voc))
    assert len(str(caught.value)) < 2000


def test_a_sample_with_a_bad_mask_says_so_in_training_too(voc):
    source = SegmentationSource(read(voc), side=32, augment=SegmentationAugmentSpec())
    write_indices(np.zeros((30, 20), np.uint8), voc / "SegmentationClass/a.png")
    with pytest.raises(DataError, match="a mask of 20 x 30 pixels"):
        source.sample(0, 0)


# ------------------------------------------------------------------------------------------------------- embedded digits
def test_the_mask_of_a_canvas_marks_the_ink_of_each_digit_within_its_box():
    drawn = canvas("train", 3, size=96, seed=0)
    inside = np.zeros_like(drawn.mask, dtype=bool)
    for (x1, y1, x2, y2), label in zip(drawn.boxes.tolist(), drawn.labels.tolist(), strict=True):
        part = drawn.mask[y1:y2, x1:x2]
        assert set(np.unique(part)) <= {0, UNCERTAIN, label + 1}
        assert np.count_nonzero(part == label + 1) > 10
        inside[y1:y2, x1:x2] = True
    assert not drawn.mask[(drawn.mask != UNCERTAIN) & ~inside].any()


def test_the_classes_of_the_embedded_set_are_the_digits_or_the_ink_alone(digits, tmp_path):
    ink = DigitsMasks(FEW.model_copy(update={"classes": "ink"})).read(SplitRequest(root=tmp_path / "ink", split="val"))
    each = DigitsMasks(FEW).read(SplitRequest(root=digits, split="val"))
    assert ink.class_names == ("background", "ink")
    for index in range(3):
        mask = each.mask(index, (64, 64))
        expected = np.where((mask > 0) & (mask < IGNORED), 1, mask)
        np.testing.assert_array_equal(ink.mask(index, (64, 64)), expected)


def test_the_embedded_set_is_made_once_and_the_same(digits, tmp_path):
    again = DigitsMasks(FEW).read(SplitRequest(root=tmp_path / "again", split="train"))
    first = DigitsMasks(FEW).read(SplitRequest(root=digits, split="train"))
    assert first.class_names == NAMES
    assert len(first) == 4
    for one, other in zip((*first.images, *first.masks), (*again.images, *again.masks), strict=True):
        assert one.read_bytes() == other.read_bytes()
    with pytest.raises(DataError, match="made with"):
        DigitsMasks(FEW.model_copy(update={"seed": 1})).read(SplitRequest(root=digits, split="train"))


# ----------------------------------------------------------------------------------------------------- fitting, samples
@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
@pytest.mark.parametrize("size_wh", [(40, 30), (30, 40), (200, 100), (7, 64), (64, 64)])
def test_what_is_laid_on_the_input_comes_back_to_the_pixels_of_the_image(resize, size_wh):
    columns, rows = np.arange(size_wh[0]) * 8 // size_wh[0], np.arange(size_wh[1]) * 4 // size_wh[1]
    mask = (rows[:, None] * 8 + columns).astype(np.uint8)
    out = np.empty((64, 64), np.uint8)
    lay_mask(mask, fit_image(size_wh, side=64, resize=resize), out, fill=IGNORED)
    returned = back(out, size_wh, resize=resize)
    assert returned.shape == mask.shape
    assert IGNORED not in returned
    tolerance = 0 if max(size_wh) <= 64 else 0.1  # a smaller input may move an edge by half of its pixels
    assert np.mean(returned != mask) <= tolerance


def test_a_letterboxed_image_is_centred_on_grey():
    out = np.empty((32, 32, 3), np.uint8)
    lay(np.full((10, 20, 3), 200, np.uint8), fit_image((20, 10), side=32, resize="letterbox"), out)
    assert (out[8:24] == 200).all()
    assert (out[:8] == 114).all()
    assert (out[24:] == 114).all()


def test_a_sample_is_a_function_of_seed_epoch_and_number_and_mask_follows_image(digits):
    train = VocMasks().read(SplitRequest(root=digits, split="train"))
    spec = SegmentationAugmentSpec(random_scale=[0.5, 2.0], flip_lr=0.5, flip_ud=0.5)
    source = SegmentationSource(train, side=48, augment=spec, seed=3)
    first = [source.sample(epoch, index).pixels for epoch in (0, 1) for index in (0, 1)]
    again = [source.sample(epoch, index).pixels for epoch in (0, 1) for index in (0, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({x.tobytes() for x in first}) == 4
    assert not np.array_equal(SegmentationSource(train, side=48, augment=spec, seed=4).sample(0, 0).pixels, first[0])
    batch = source.collate([source.sample(0, index) for index in (2, 0)])
    assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
        "pixels": (np.uint8, (2, 48, 48, 4)), "index": (np.int64, (2,)),
    }  # fmt: skip
    np.testing.assert_array_equal(batch["pixels"][1], first[0])


def test_image_and_mask_stay_together_whatever_is_drawn(tmp_path):
    """An image whose grey is its class: after every change its classes are still its greys."""
    mask = np.kron(np.arange(4, dtype=np.uint8).reshape(2, 2), np.ones((40, 40), np.uint8))
    (tmp_path / "JPEGImages").mkdir()
    Image.fromarray(np.repeat(mask[..., None] * 60, 3, axis=2)).save(tmp_path / "JPEGImages" / "a.png")
    write_indices(mask, tmp_path / "SegmentationClass" / "a.png")
    split = read(tmp_path, "all")
    spec = SegmentationAugmentSpec(random_scale=[0.4, 2.5], flip_lr=0.5, flip_ud=0.5, hsv_h=0, hsv_s=0, hsv_v=0)
    source, seen = SegmentationSource(split, side=64, augment=spec), set()
    for epoch in range(30):
        pixels = source.sample(epoch, 0).pixels
        grey, classes = pixels[..., 0].astype(int), pixels[..., 3].astype(int)
        near_edge = (
            cv2.dilate(cv2.morphologyEx(pixels[..., 3], cv2.MORPH_GRADIENT, np.ones((3, 3))), np.ones((3, 3))) > 0
        )
        expected = np.where(classes == IGNORED, 114, classes * 60)
        # An edge just outside of the window still blends into its border.
        assert np.mean(grey[~near_edge] != expected[~near_edge]) < 0.02
        seen |= {(classes == IGNORED).any(), tuple(classes[[0, 0, -1, -1], [0, -1, 0, -1]])}
    assert True in seen
    assert len(seen) > 4


def test_evaluation_samples_are_the_letterboxed_images_without_classes(val):
    pixels = SegmentationSource(val, side=64).sample(0, 0).pixels
    np.testing.assert_array_equal(pixels[..., :3], val.image(0))
    assert (pixels[..., 3] == IGNORED).all()


# ------------------------------------------------------------------------------------------------------------ the metrics
def guesses(val, seed=0):
    rng = np.random.default_rng(seed)
    wrong = rng.integers(0, 11, (len(val), 64, 64), np.uint8)
    truth = np.stack([val.mask(i, (64, 64)) for i in range(len(val))])
    return truth, np.where((rng.random(truth.shape) < 0.7) & (truth != IGNORED), truth, wrong).astype(np.uint8)


def evaluated(val, predictions, shares):
    partials = []
    for share in shares:
        evaluator = MaskEvaluator(val, resize="letterbox")
        evaluator.add({"index": np.array(share)}, [{"classes": predictions[i]} for i in share])
        partials.append(unpack(pack(evaluator.partial())))
    evaluator = MaskEvaluator(val, resize="letterbox")
    return evaluator, evaluator.result(partials), partials


def test_metrics_are_those_of_scikit_learn_over_all_labelled_pixels(val):
    from sklearn.metrics import confusion_matrix, jaccard_score

    truth, predictions = guesses(val)
    evaluator, metrics, _ = evaluated(val, predictions, [[0, 1, 2]])
    y, p = truth[truth != IGNORED], predictions[truth != IGNORED]
    np.testing.assert_array_equal(evaluator.confusion, confusion_matrix(y, p, labels=range(11)))
    by_class = jaccard_score(y, p, labels=range(11), average=None)
    for label, name in enumerate(NAMES):
        assert metrics[f"iou/{name}"] == pytest.approx(by_class[label], rel=1e-15)
    assert metrics["miou"] == metrics["score"] == pytest.approx(by_class.mean(), rel=1e-15)
    assert metrics["pixel_accuracy"] == pytest.approx((y == p).mean(), rel=1e-15)
    assert evaluator.remarks()[0].startswith("wrong pixels: ")


def test_metrics_are_the_same_for_any_number_of_ranks_and_a_repeated_image_counts_once(val):
    _, predictions = guesses(val)
    alone = evaluated(val, predictions, [[0, 1, 2]])[1]
    for shares in ([[0, 2], [1, 0]], [[2], [1], [0], [0]], [[1, 2, 0, 1, 2]]):
        assert evaluated(val, predictions, shares)[1] == alone
    evaluator = MaskEvaluator(val, resize="letterbox")
    for again in (predictions, 0 * predictions):  # what fills a last batch up may be computed otherwise
        evaluator.add({"index": np.arange(3)}, [{"classes": again[i]} for i in range(3)])
    assert evaluator.result([evaluator.partial()]) == alone


def test_a_class_that_occurs_nowhere_has_no_metric_and_a_perfect_prediction_scores_one(val):
    truth, _ = guesses(val)
    _, metrics, _ = evaluated(val, np.where(truth == IGNORED, 0, truth), [[0, 1, 2]])
    present = set(np.unique(truth)) - {IGNORED}
    assert {name for name in metrics if name.startswith("iou/")} == {f"iou/{NAMES[label]}" for label in present}
    assert metrics["miou"] == metrics["pixel_accuracy"] == 1
    assert MaskEvaluator(val, resize="letterbox").result([])["miou"] == 0


def test_images_of_other_sizes_are_scored_in_their_own_pixels(voc):
    split = read(voc)
    truth = split.mask(0, (30, 20))
    out = np.empty((64, 64), np.uint8)
    lay_mask(
        np.where(truth == IGNORED, 0, truth).astype(np.uint8),
        fit_image((30, 20), side=64, resize="letterbox"),
        out,
        fill=0,
    )
    evaluator = MaskEvaluator(split, resize="letterbox")
    evaluator.add({"index": np.array([0])}, [{"classes": out}])
    assert evaluator.result([evaluator.partial()])["miou"] == 1
    assert evaluator.confusion.sum() == 17 * 30


# ------------------------------------------------------------------------------------------------ drawings, predictions
def test_drawings_have_the_colours_of_the_classes(digits, val):
    image, mask = val.image(0), val.mask(0, (64, 64))
    drawn = overlay(image, mask)
    unlabelled_pixels = (mask == 0) | (mask == IGNORED)
    np.testing.assert_array_equal(drawn[unlabelled_pixels], image[unlabelled_pixels])
    inked = ~unlabelled_pixels
    expected = 0.4 * image[inked] + 0.6 * colours()[mask[inked]].astype(float)
    np.testing.assert_allclose(drawn[inked], expected, atol=0.51)
    _, predictions = guesses(val)
    partial = evaluated(val, predictions, [[0, 1, 2]])[2][0]
    assert comparison(val, partial).shape[2] == 3
    assert masks_grid(val, limit=2).size
    source = SegmentationSource(val, side=64, augment=SegmentationAugmentSpec())
    assert inputs_grid(source, val, limit=2).size


def test_predictions_become_indexed_images_of_the_size_of_the_image_and_a_summary(tmp_path):
    Image.new("RGB", (30, 20), (10, 200, 30)).save(tmp_path / "x.png")
    spec = load("unet_digits").spec
    images = SegmentationImages(spec, without_labels([tmp_path / "x.png"], class_names=NAMES, max_pixels=10_000))
    classes, certainty = np.zeros((64, 64), np.uint8), np.full((64, 64), 51, np.uint8)
    classes[:, 32:], certainty[:, 32:] = 3, 204
    collector = images.evaluator()
    collector.add({"index": np.array([0])}, [{"classes": classes, "certainty": certainty}])
    images.write(collector.partial(), tmp_path / "out", confidence=0.5, draw=True)
    indices = read_indices(tmp_path / "out" / "x.png")
    assert indices.shape == (20, 30)
    assert (indices[:, 15:] == 3).all()
    assert not indices[:, :15].any()
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert rows == [
        {"file_name": str(tmp_path / "x.png"), "class": "2", "label": 3, "score": 0.8, "share": 0.5, "mask": "x.png"}
    ]
    assert (tmp_path / "out" / "x.jpg").is_file()
    with pytest.raises(DataError, match="1 of 1 images cannot be read"):
        without_labels([tmp_path / "x.png"], class_names=NAMES, max_pixels=10)


def test_the_task_checks_describes_and_shows_a_data_set(digits):
    spec = load(
        "unet_digits", overrides=[f"data.root={digits}", "data.options={train: 4, val: 3, classes: digits}"]
    ).spec
    task = SegmentationTask(spec, open_data(spec.data))
    assert task.verify() == "7 images with their masks, all read"
    assert task.task().class_names == NAMES
    pixels = task.describe()[1].rows
    assert [row[1] for row in pixels] == [*NAMES, "no class"]
    assert sum(float(row[2].rstrip("%")) for row in pixels) == pytest.approx(100, abs=0.1)
    assert [name for name, _, image in task.views(limit=2) if image.size] == ["train", "val", "augmented"]


def test_the_index_that_counts_nowhere_is_the_same_in_data_and_models():
    """Models may not import data, so that the constant is there twice."""
    source = (Path(segmenter.__file__).parent / "pixel_losses.py").read_text()
    assert f"IGNORED = {IGNORED}\n" in source
    assert UNCERTAIN == IGNORED


def test_an_error_of_a_mask_travels_between_processes(tmp_path):
    with pytest.raises(ImageError) as caught:
        read_indices(tmp_path / "nothing.png")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_limit_of_pixels_holds_for_masks_too(voc):
    split = replace(read(voc), max_pixels=100)
    with pytest.raises(DataError, match=r"2 of 2 images cannot be used"):
        count_pixels(split)
