"""Translate PaddleDetection's YAML of a PP-YOLOE or RT-DETR job to a spec."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.errors import SpecError
from mtrain.spec.importers import paddledetection_data as data
from mtrain.spec.importers import paddledetection_network as network
from mtrain.spec.importers import paddledetection_rtdetr as rtdetr
from mtrain.spec.importers import paddledetection_training as training
from mtrain.spec.importers.documents import Document
from mtrain.spec.importers.importer import Importer
from mtrain.spec.importers.key_report import Book, equal, show_value
from mtrain.spec.yaml_reader import Path

CARDS = 8
"""Number of cards of the machine for which the published files are written."""
DISTILLED = 0.125
"""Factor of all losses where PaddleDetection distils PP-YOLOE."""
_KEYS = ("architecture", "LearningRate", "OptimizerBuilder", "TrainReader", "EvalReader", "TrainDataset", "EvalDataset")
_PLACES = ("xpu", "npu", "mlu", "gcu", "ipu")
"""Devices besides GPUs that Paddle supports."""


class PaddleDetection(Importer):
    """PaddleDetection's YAML of a PP-YOLOE or RT-DETR job; it names its bases itself."""

    expected: ClassVar[str] = "PaddleDetection's YAML with `architecture`"

    def recognises(self, documents: Sequence[Document]) -> bool:
        """Return whether a file has keys of PaddleDetection."""
        return any(map(_is_one, documents))

    def translate(self, documents: Sequence[Document], *, cards: int | None) -> Sequence[Book]:
        """Translate one file, and that of ``--slim_config`` with a teacher; ``cards``: see ``translate`` of this module."""
        teachers = [document for document in documents if document.values.get("slim") == "Distill"]
        students = [document for document in documents if document not in teachers]
        if len(students) > 1 or len(teachers) > 1:
            first = next(filter(_is_one, documents), documents[0])
            raise SpecError(
                f"{first.name}: import a config of PaddleDetection alone, or with one of `slim: Distill`; it names its bases itself"
            )
        if not students:
            raise SpecError(
                f"{teachers[0].name}: is what --slim_config takes, a teacher; give its student's file too: mtrain config import "
                f"STUDENT.yml {teachers[0].name} --to spec.yml"
            )
        books = [translate(students[0], cards=cards)]
        if teachers:
            return [*books, _translate_teacher(teachers[0])]
        if books[0].get("for_distill") is True:
            books[0].note(
                "for_distill: the teacher is in the file of --slim_config, without which nothing is imitated: "
                f"mtrain config import {students[0].name} SLIM.yml"
            )
        return books


def _is_one(document: Document) -> bool:
    return any(key in document.values for key in _KEYS)


def translate(document: Document, *, cards: int | None) -> Book:
    """Translate a file that names an architecture, and return its book.

    Args:
        cards: number of cards for which the batch per card and the learning rate of the file are meant; None: eight, of RT-DETR four.

    Raises: ``SpecError`` where it describes what mtrain does not have.
    """
    book = Book(document)
    is_rtdetr = rtdetr.is_one(book)
    model = rtdetr.translate(book) if is_rtdetr else network.translate(book)
    usual = rtdetr.CARDS if is_rtdetr else CARDS
    data.translate(book, cards=usual if cards is None else cards, cards_given=cards is not None)
    training.translate(book)
    _runtime(book)
    _weights(book, model)
    if not is_rtdetr:
        book.note("backend: not set, so mtrain's default trains; `--backend fleet` trains the same with Paddle Fleet")
    book.close()
    return book


def _translate_teacher(document: Document) -> Book:
    """Translate the file of ``--slim_config``: which network teaches, and how much of the loss its imitation is."""
    book = Book(document)
    weights, loss = book.word("pretrain_weights", ""), "DistillPPYOLOELoss"
    if not weights:
        raise book.refuse("pretrain_weights", "expected the weights of the teacher")
    if "://" in weights:
        book.note(f"train.distil.teacher: mtrain downloads nothing; fetch {weights}, or name another file or a run")
    book.carry("pretrain_weights", "train.distil.teacher", weights.rsplit("/", 1)[-1] if "://" in weights else weights)
    book.put("train.distil.model", network.translate(Book(document)), "depth_mult")
    book.assume("train.distil.labels", DISTILLED, "PaddleDetection multiplies the sum of the three losses")
    for key, target, usual in (("logits", "outputs", 4.0), ("feat", "features", 1.0)):
        is_on = book.truth(f"{loss}.{key}_distill", default=True)
        factor = DISTILLED * book.number(f"{loss}.loss_weight.{key}", usual) if is_on else 0.0
        book.settle(
            f"{loss}.loss_weight.{key}", f"train.distil.{target}", factor, remark=f"train.distil.{target}: {factor:g}"
        )
        book.same(f"{loss}.{key}_distill", f"train.distil.{target}: {factor:g}")
    book.drop(loss, "mtrain compares scores, boxes and attention maps (docs/distilling.md)")
    for key in ("slim", "slim_method", "distill_loss"):
        book.same(key, "train.distil")
    for key in ("architecture", "depth_mult", "width_mult"):
        book.same(key, f"train.distil.model: {book.values['train.distil.model'].value}")
    book.drop((), "of the teacher's own training")
    return book


def _runtime(book: Book) -> None:
    book.carry("log_iter", "report.every_updates")
    book.carry("save_dir", "report.dir")
    if book.has("snapshot_epoch"):
        every = book.get("snapshot_epoch")
        book.put("evaluate.every_epochs", every, "snapshot_epoch")
        book.carry(
            "snapshot_epoch", "checkpoint.every_epochs", remark=f"and evaluate.every_epochs: {show_value(every)}"
        )
        book.note(
            "evaluate.every_epochs: PaddleDetection scores at its snapshots where --eval is given; mtrain always does"
        )
    if book.truth("use_gpu", default=True):
        book.same("use_gpu", "mtrain takes the GPUs that it finds")
    else:
        book.carry("use_gpu", "backend.options.device", "cpu")
    for place in _PLACES:
        if not book.truth(f"use_{place}", default=False):
            book.same(f"use_{place}", "off, as always in mtrain")
    if book.has("amp"):
        book.carry("amp", "train.precision", "fp16" if book.truth("amp", default=False) else "fp32")
    book.drop("custom_black_list", "names operators for Paddle's own mixed precision")
    book.drop("find_unused_parameters", "every parameter takes part in every update")
    book.drop("weights", "names what PaddleDetection evaluates; `mtrain evaluate` takes a run")
    book.drop("export", "belongs to PaddleDetection's export")
    _metric(book)


def _metric(book: Book) -> None:
    if equal(book.get("metric"), "COCO"):
        book.same("metric", "mtrain scores COCO's AP")
    book.drop("metric", "mtrain scores COCO's AP; evaluate.score: AP50 is next to VOC's")
    book.drop("num_classes", "the classes are those of the annotations, which must be as many")


def _weights(book: Book, model: str) -> None:
    source: str | Path = "pretrain_weights"
    weights = book.get(source)
    if weights in (None, ""):
        book.same(source, "mtrain's default: from scratch")
    elif not isinstance(weights, str) or "://" in weights:
        remedy = (
            f"`mtrain weights import FILE --model {model} --to start.safetensors`, -o model.weights=start.safetensors"
        )
        book.drop(source, f"mtrain downloads nothing; fetch the file, then {remedy}")
        book.note(f"pretrain_weights is not carried over: as it stands, the spec trains {model} from scratch")
    else:
        # PaddleDetection names its files of weights without a suffix.
        book.carry(source, "model.weights", weights if weights.endswith(".pdparams") else f"{weights}.pdparams")
