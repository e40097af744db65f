"""Translate data sets and readers of a PaddleDetection file: paths, batch, pre-processing, augmentation."""

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mtrain.spec.importers import paddledetection_augment as augment
from mtrain.spec.importers.key_report import Book, equal, show_value
from mtrain.spec.importers.paddledetection_augment import normalisation, square, transforms
from mtrain.spec.yaml_reader import Path

FORMATS = {"COCODataSet": "coco", "VOCDataSet": "voc"}
FIELDS = {"image", "gt_bbox", "gt_class", "is_crowd", "difficult"}
"""Fields of each sample that mtrain reads."""
READER: Mapping[str, Any] = {"shuffle": True, "drop_last": True, "use_shared_memory": True, "collate_batch": True}
"""Settings that mtrain's loader always has in training."""
EVAL_SIZES = ("eval_size", "eval_height", "eval_width", "PPYOLOEHead.eval_size", "PPYOLOEHead.eval_input_size")
"""Keys that repeat the side of EvalReader's Resize."""
LINEAR, CUBIC = 1, 2
"""OpenCV's numbers of interpolations; linear is PaddleDetection's default."""
_TRAIN, _EVAL = "TrainDataset", "EvalDataset"


def translate(book: Book, *, cards: int, cards_given: bool) -> None:
    """Enter data sets, batch sizes and readers.

    Args:
        cards_given: whether the user gave the number of cards; otherwise it is assumed.
    """
    _datasets(book)
    book.carry("worker_num", "data.workers")
    _batch(book, cards=cards, cards_given=cards_given)
    _evaluation(book)
    augment.translate(book)
    for key, value in READER.items():
        book.expect_fixed(("TrainReader", key), value, what="mtrain's loader")
    book.drop("TestDataset", "belongs to PaddleDetection's infer; `mtrain predict` takes images")
    _test_reader(book)


def _datasets(book: Book) -> None:
    if not book.has(_TRAIN):
        book.note("data.format: the file names no TrainDataset, so mtrain's default (the embedded digits) stands")
        return
    kind = book.word(f"{_TRAIN}.name", "")
    if kind not in FORMATS:
        raise book.refuse(
            f"{_TRAIN}.name" if kind else _TRAIN, f"expected a data set called one of {', '.join(FORMATS)}"
        )
    book.carry(f"{_TRAIN}.name", "data.format", FORMATS[kind])
    for section in (_TRAIN, _EVAL):
        _same_kind(book, section, kind)
        _flags(book, section)
    root = book.get(f"{_TRAIN}.dataset_dir") or "."
    book.put("data.root", root, f"{_TRAIN}.dataset_dir")
    book.same(f"{_TRAIN}.dataset_dir", f"data.root: {show_value(root)}")
    book.carry(f"{_TRAIN}.anno_path", "data.train")
    _eval_path(book, str(root))
    if FORMATS[kind] == "voc":
        _label_list(book)
    else:
        _images(book)


def _label_list(book: Book) -> None:
    """Enter the classes of a VOC set and their order, and the folder from which its lists name images and XML files."""
    sources = [f"{section}.label_list" for section in (_TRAIN, _EVAL)]
    given = [book.get(source) for source in sources if book.get(source) is not None]
    if not given:
        book.note(
            "label_list is not given: mtrain takes the classes of the annotations, PaddleDetection the 20 of Pascal VOC"
        )
    elif len(set(map(str, given))) > 1:
        raise book.refuse(
            sources[1], f"expected {show_value(given[0])} as in {_TRAIN}: both splits have the same classes"
        )
    for source in sources:
        book.carry(source, "data.options.label_list")
        book.same(source, f"data.options.label_list: {show_value(book.get(source))}")
    folders = [f"{section}.image_dir" for section in (_TRAIN, _EVAL) if book.has(section)]
    if any(map(book.get, folders)):
        _one_folder(book, folders)


def _same_kind(book: Book, section: str, kind: str) -> None:
    if book.has(section) and book.word(f"{section}.name", kind) != kind:
        raise book.refuse(f"{section}.name", f"expected {kind} as in {_TRAIN}")
    book.same(f"{section}.name", f"data.format: {FORMATS[kind]}")


def _flags(book: Book, section: str) -> None:
    fields = book.get(f"{section}.data_fields")
    if isinstance(fields, list) and FIELDS.issuperset(map(str, fields)):
        book.same(f"{section}.data_fields", "what mtrain reads anyway")
    book.drop(f"{section}.data_fields", f"mtrain reads {', '.join(sorted(FIELDS))}")
    if book.truth(f"{section}.allow_empty", default=False):
        book.same(f"{section}.allow_empty", "as always in mtrain")
    elif book.has(section):
        what = "training" if section == _TRAIN else "scoring"
        book.drop(f"{section}.allow_empty", f"mtrain takes images without boxes into {what}")
        book.note(
            f"{section}.allow_empty is not true: PaddleDetection leaves images without boxes out, mtrain does not"
        )
    if equal(book.get(f"{section}.sample_num"), -1):
        book.same(f"{section}.sample_num", "all, as always in mtrain")
    book.drop(f"{section}.sample_num", "mtrain takes all images of an annotation file")


def _eval_path(book: Book, root: str) -> None:
    source, other = f"{_EVAL}.anno_path", str(book.get(f"{_EVAL}.dataset_dir") or ".")
    if os.path.normpath(other) == os.path.normpath(root) or not book.has(source):
        book.carry(source, "data.val")
    else:
        # Each of its data sets has a folder of its own, and mtrain has one root for both splits.
        book.carry(source, "data.val", os.path.relpath(os.path.join(other, str(book.get(source))), root))
    book.same(
        f"{_EVAL}.dataset_dir",
        f"data.val: {show_value(book.values['data.val'].value)}" if book.has(source) else "data.root",
    )


def _images(book: Book) -> None:
    """Enter the image folders. mtrain has one for both splits, and by default looks for COCO's own."""
    sources = [f"{section}.image_dir" for section in (_TRAIN, _EVAL) if book.has(section)]
    folders = [book.get(source) or "." for source in sources]
    usual = [_usual(book.get(f"{section}.anno_path")) for section in (_TRAIN, _EVAL) if book.has(section)]
    if folders == usual:
        for source in sources:
            book.same(source, "where mtrain looks without data.images")
        return
    _one_folder(book, sources)


def _one_folder(book: Book, sources: Sequence[str]) -> None:
    """Enter the image folders of the splits as one, if they are."""
    folders = {str(book.get(source) or ".") for source in sources}
    if len(folders) <= 1:
        for source in sources:
            book.settle(source, "data.images", *folders, remark=f"data.images: {show_value(*folders)}")
        return
    for source in sources:
        book.drop(source, "mtrain has one image folder; give one that holds both, with their folders in file_name")
    book.note("data.images: training and evaluation have images in different folders, which the spec cannot say")


def _usual(annotations: Any) -> str:
    return PurePosixPath(str(annotations)).stem.removeprefix("instances_")


def _batch(book: Book, *, cards: int, cards_given: bool) -> None:
    source = "TrainReader.batch_size"
    if not book.has(source):
        book.note("train.batch_size: the file gives no TrainReader.batch_size, so mtrain's default stands")
        return
    per_card = book.integer(source, 1)
    total = per_card * cards
    # The learning rate of the file is meant for the batch of all cards, so other batches scale it from there.
    book.put("train.reference_batch_size", total, source)
    book.put("train.max_micro_batch", per_card, source)
    book.carry(
        source,
        "train.batch_size",
        total,
        remark=f"{cards} cards x {per_card}; global, and the learning rate's reference",
    )
    book.assume(
        "train.learning_rate_scaling", "linear", "the learning rate of a PaddleDetection file goes with its cards"
    )
    why = (
        "as --cards says"
        if cards_given
        else f"PaddleDetection's own files are written for {cards}; --cards N says otherwise"
    )
    book.note(
        f"train.batch_size: {total} = {cards} cards x {per_card}: {why}. The learning rate is meant for {total}, and follows "
        "the batch"
    )


def _evaluation(book: Book) -> None:
    book.carry("EvalReader.batch_size", "evaluate.batch_size")
    for at, name in transforms(book, ("EvalReader", "sample_transforms")):
        if name in ("Decode", "Permute"):
            book.same(at, "as always in mtrain")
        elif name == "Resize":
            _resize(book, at)
        elif name == "NormalizeImage":
            normalisation(book, at)
    side = book.values.get("data.image_size")
    for key in EVAL_SIZES:
        if side is not None and book.get(key) in (side.value, [side.value, side.value]):
            book.same(key, f"data.image_size: {side.value}")


def _resize(book: Book, at: Path) -> None:
    side = square(book.get((*at, "target_size")))
    if side is None:
        raise book.refuse(
            (*at, "target_size"), "expected one side in pixels or two equal ones: mtrain's input is a square"
        )
    book.carry((*at, "target_size"), "data.image_size", side)
    book.put("data.resize", "stretch", (*at, "keep_ratio"))
    if book.truth((*at, "keep_ratio"), default=True):
        book.drop((*at, "keep_ratio"), "mtrain's pre-processing of PP-YOLOE stretches images to a square")
        book.note("data.resize: stretch, although EvalReader keeps the ratio")
    book.same((*at, "keep_ratio"), "data.resize: stretch")
    # Reported and not refused: it changes metrics, and no weight.
    book.expect_fixed((*at, "interp"), CUBIC, what="mtrain's evaluation of stretched images")
    if not equal(book.get((*at, "interp"), LINEAR), CUBIC):
        book.note("evaluation and prediction resize by cubic interpolation in mtrain, by another in EvalReader")


def _test_reader(book: Book) -> None:
    """Enter TestReader: PaddleDetection predicts through it, mtrain through the pre-processing of evaluation."""
    side = book.values.get("data.image_size")
    if side is not None and equal(book.get("TestReader.inputs_def.image_shape"), [3, side.value, side.value]):
        book.same("TestReader.inputs_def.image_shape", f"data.image_size: {side.value}")
    ours, theirs = (book.get(f"{reader}.sample_transforms") for reader in ("EvalReader", "TestReader"))
    if equal(ours, theirs):
        book.same("TestReader.sample_transforms", "as in EvalReader, through which `mtrain predict` goes too")
    book.drop("TestReader", "belongs to PaddleDetection's infer; `mtrain predict` prepares images as evaluation does")
