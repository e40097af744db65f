"""Metrics, overlaps, suppression, schedules and losses beside those of other packages, on random hard cases, in one process.

Each test names what it compares and draws its cases from a seed of its own: empty images, equal scores, crowds, one class,
boxes without an area, pixels without a class, logits that are as good as infinite. A package that is not installed skips it.
"""

import contextlib
import importlib.util
import io
import logging
import sys
import unittest
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mtrain.backends._torch import nn, ops
from mtrain.core import binding
from mtrain.core.update.schedule import Schedule
from mtrain.models.common import boxes as overlaps
from mtrain.models.common import losses, nms, pixel_losses
from mtrain.spec.model import Spec
from mtrain.tasks.classification.evaluator import ClassEvaluator
from mtrain.tasks.detection import evaluator as detection
from mtrain.tasks.detection import scoring
from mtrain.tasks.segmentation.evaluator import MaskEvaluator
from mtrain_language import likelihoods, network, packing
from mtrain_language.evaluator import TokenEvaluator

CASES = 300
IGNORED = 255


def needs(*packages: str) -> Any:
    """Skip a test where a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return unittest.skipIf(missing, f"{', '.join(missing)}: not installed")


def draws(seed: int, cases: int = CASES) -> Iterator[np.random.Generator]:
    """A generator of random numbers for each case."""
    for case in range(cases):
        yield np.random.default_rng((seed, case))


def draw_boxes(rng: np.random.Generator, count: int, *, whole: bool, side: int = 40) -> Any:
    """Boxes x1, y1, x2, y2, some twice, some without an area."""
    corners = rng.integers(0, side, (count, 2, 2)) if whole else rng.uniform(0, side, (count, 2, 2))
    boxes = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float64)
    if count:
        again = rng.integers(0, count, (2, max(count // 5, 1)))
        boxes[again[0]] = boxes[again[1]]
    return boxes


class HardCases(unittest.TestCase):
    """One test for each pair of ours and theirs."""

    def setUp(self) -> None:
        """Compute with torch, and one thread."""
        binding.unbind()
        binding.bind(nn, ops)
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # timm's, of rates that stay

    def close(self, ours: Any, theirs: Any, *, most: float = 1e-12) -> None:
        """Equal up to rounding; not a number in the same places."""
        np.testing.assert_allclose(np.asarray(ours, float), np.asarray(theirs, float), rtol=most, atol=most)

    @needs("pycocotools")
    def test_coco_metrics_are_those_of_pycocotools(self) -> None:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests.data_readers.results_files import Listed

        for rng in draws(1):
            truth, entries = draw_set(rng)
            ours, _ = scoring.score(truth, Listed(entries=kept(entries)))
            self.close([ours[name] for name in scoring.METRICS], stats_of_pycocotools(truth, entries))

    @needs("torchvision")
    def test_suppression_keeps_the_boxes_of_torchvision(self) -> None:
        from torchvision.ops import batched_nms
        from torchvision.ops import nms as their_nms

        for rng in draws(3):
            count, whole = int(rng.choice([0, 1, 2, 30, 150, 900])), bool(rng.random() < 0.5)
            boxes = draw_boxes(rng, count, whole=whole).astype(np.float32)
            scores = rng.choice([0.1, 0.5, 0.9, *rng.random(5)], count).astype(np.float32)
            classes = rng.integers(0, rng.choice([1, 3, 90]), count)
            # At halves and quarters, whole numbers have overlaps that are exactly the threshold.
            threshold = float(rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]) if whole else rng.uniform(0, 1))
            tensors = torch.from_numpy(boxes), torch.from_numpy(scores)
            for groups in (None, classes):
                if groups is None:
                    theirs = their_nms(*tensors, threshold)
                else:
                    theirs = batched_nms(*tensors, torch.from_numpy(groups), threshold)
                given = (boxes, scores, groups)
                ours = nms.suppress(*given, iou_threshold=threshold, max_kept=count)
                order, none = np.argsort(-scores, kind="stable"), np.zeros(count, np.int64)
                slow = nms._suppressed_by_numpy(boxes, none if groups is None else groups, order, threshold, count)
                np.testing.assert_array_equal(slow, ours)
                # Theirs moves each class to a place of its own, which costs digits: as a set, and in the order of scores.
                np.testing.assert_array_equal(sorted(ours), sorted(theirs.numpy()))
                np.testing.assert_array_equal(scores[ours], scores[theirs.numpy()])

    @needs("torchvision")
    def test_at_the_threshold_suppression_is_as_near_to_exact_numbers_as_torchvision(self) -> None:
        from torchvision.ops import nms as their_nms

        wrong = {"ours": 0, "theirs": 0}
        for rng in draws(4):
            boxes = draw_boxes(rng, 40, whole=True, side=12)
            scores = np.linspace(1, 0, 40, dtype=np.float32)
            threshold = Fraction(int(rng.integers(1, 20)), 20)
            exact = keep_exactly(boxes.astype(int).tolist(), threshold)
            small = boxes.astype(np.float32)
            ours = nms.suppress(small, scores, iou_threshold=float(threshold), max_kept=40).tolist()
            theirs = their_nms(torch.from_numpy(small), torch.from_numpy(scores), float(threshold)).tolist()
            wrong["ours"] += ours != exact
            wrong["theirs"] += theirs != exact
        print(f"sets of boxes with another outcome than exact numbers, of {CASES}: {wrong}")
        assert wrong["ours"] <= wrong["theirs"]

    @needs("torchvision")
    def test_overlaps_and_their_gradients_are_those_of_torchvision(self) -> None:
        from torchvision.ops import box_iou, complete_box_iou_loss, generalized_box_iou_loss

        for rng in draws(5):
            one, other = (draw_boxes(rng, 20, whole=bool(rng.random() < 0.3)) for _ in range(2))
            other[:3], one[3:5] = one[:3], np.repeat(one[3:5, :2], 2, axis=0).reshape(2, 4)
            both = torch.tensor(one), torch.tensor(other)
            pairs = overlaps.overlap_N(both[0][:, None], both[1][None], eps=0.0)
            self.close(pairs, box_iou(*both))
            for ours, theirs in (
                (lambda a, b: 1 - overlaps.generalised_iou_N(a, b, eps=1e-7), generalized_box_iou_loss),
                (lambda a, b: 1 - overlaps.complete_iou_N(centres(a), centres(b)), complete_box_iou_loss),
            ):
                self.close(ours(*both), theirs(*both), most=1e-9)
                # Where boxes touch the overlap has a kink. Theirs has no gradient of it there; ours draws them together.
                sides = torch.minimum(both[0][:, 2:], both[1][:, 2:]) - torch.maximum(both[0][:, :2], both[1][:, :2])
                apart = (sides != 0).all(dim=1)
                self.compare_gradients(ours, theirs, *(boxes[apart] for boxes in both), most=1e-9)

    def compare_gradients(self, ours: Any, theirs: Any, *given: torch.Tensor, most: float = 1e-12) -> None:
        """The value of each element, and the gradient of their sum with respect to the first tensor."""
        found = []
        for function in (ours, theirs):
            leaf = given[0].clone().requires_grad_()
            values = function(leaf, *given[1:])
            values.sum().backward()
            found.append((values.detach(), leaf.grad))
        for mine, their in zip(*found, strict=True):
            self.close(mine, their, most=most)

    @needs("torchvision")
    def test_the_focal_loss_is_that_of_torchvision(self) -> None:
        from torchvision.ops import sigmoid_focal_loss

        for rng in draws(6):
            logits = torch.tensor(rng.normal(0, rng.choice([1, 30, 1000]), (5, 7)))
            targets = torch.tensor(rng.choice([0.0, 1.0, 0.3], (5, 7)))
            alpha, gamma = float(rng.uniform(0, 1)), float(rng.choice([1.0, 1.5, 2.0]))
            self.compare_gradients(
                lambda x, t, a=alpha, g=gamma: losses.focal_cross_entropy(x, t, alpha=a, gamma=g),
                lambda x, t, a=alpha, g=gamma: sigmoid_focal_loss(x, t, alpha=a, gamma=g),
                logits,
                targets,
            )

    @needs("timm")
    def test_label_smoothing_is_that_of_timm(self) -> None:
        from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

        for rng in draws(7):
            logits = torch.tensor(rng.normal(0, rng.choice([1, 100]), (6, 9)))
            labels, share = torch.tensor(rng.integers(0, 9, 6)), float(rng.uniform(0, 0.9))
            target = (1 - share) * torch.nn.functional.one_hot(labels, 9).double() + share / 9
            for theirs, wanted in ((LabelSmoothingCrossEntropy(share), labels), (SoftTargetCrossEntropy(), target)):
                self.compare_gradients(
                    lambda x, y, s=share: ops.cross_entropy(x, y, label_smoothing=s).mean(),
                    lambda x, _, t=theirs, y=wanted: t(x, y),
                    logits,
                    labels,
                    most=1e-11,
                )

    def test_the_loss_of_pixels_is_the_cross_entropy_of_torch(self) -> None:
        alone = SimpleNamespace(all_reduce=lambda x, _: x)
        for rng in draws(8):
            logits = torch.tensor(rng.normal(0, rng.choice([1, 100]), (2, 4, 6, 6)))
            masks = rng.choice([*range(4), IGNORED], (2, 6, 6), p=rng.dirichlet(np.full(5, 0.3)))
            pixels = torch.zeros((2, 6, 6, 4), dtype=torch.uint8)
            pixels[..., 3] = torch.from_numpy(masks)
            weights, share = rng.uniform(0.1, 5, 4), float(rng.choice([0.0, 0.1]))
            for given in ((), tuple(weights)):
                settings = {"label_smoothing": share, "collective": alone, "class_weights": given}
                ours = pixel_losses.pixel_loss(logits, {"pixels": pixels}, **settings)
                of_classes = torch.tensor(weights) if given else None
                theirs = torch.nn.functional.cross_entropy(
                    logits, torch.from_numpy(masks), of_classes, ignore_index=IGNORED, label_smoothing=share
                )
                # Without any pixel of a class it is 0, where torch has no number, which would end the training.
                self.close(ours, 0.0 if (masks == IGNORED).all() else theirs, most=1e-11)

    @needs("sklearn", "torchmetrics")
    def test_accuracies_are_those_of_sklearn_and_torchmetrics(self) -> None:
        from sklearn.metrics import balanced_accuracy_score, confusion_matrix
        from torchmetrics.functional.classification import multiclass_accuracy

        for rng in draws(9):
            classes, count = int(rng.choice([2, 3, 12])), int(rng.choice([1, 2, 50]))
            labels = rng.choice(classes, count, p=rng.dirichlet(np.full(classes, 0.4)))
            chances = rng.choice([0.0, 0.5, 1.0, *rng.random(3)], (count, classes)).astype(np.float32)
            names = [f"c{label}" for label in range(classes)]
            evaluator = ClassEvaluator(SimpleNamespace(class_names=names, labels=labels))  # type: ignore[arg-type]
            for rank in range(3):  # each with the first one again, as what fills up the last batch
                mine = [*range(rank, count, 3), 0]
                evaluator.add({"index": np.array(mine)}, [chances[index] for index in mine])
            ours = evaluator.result([evaluator.partial()])
            guesses = chances.argmax(axis=1)
            np.testing.assert_array_equal(evaluator.confusion, confusion_matrix(labels, guesses, labels=range(classes)))
            present = sorted(set(labels.tolist()))
            shares = [np.mean(guesses[labels == label] == label) for label in present]
            given = (torch.from_numpy(chances), torch.from_numpy(labels), classes)
            self.close(ours["accuracy"], multiclass_accuracy(*given, average="micro"), most=1e-6)
            self.close(shares, multiclass_accuracy(*given, average="none")[present], most=1e-6)
            self.close([ours[f"accuracy/c{label}"] for label in present], shares)
            if np.isin(guesses, present).all():  # sklearn warns of guesses of other classes
                self.close(ours["balanced_accuracy"], balanced_accuracy_score(labels, guesses))

    @needs("sklearn", "torchmetrics")
    def test_overlaps_of_masks_are_those_of_sklearn_and_torchmetrics(self) -> None:
        from sklearn.metrics import jaccard_score
        from torchmetrics.functional.classification import multiclass_jaccard_index

        for rng in draws(10):
            classes = int(rng.choice([2, 5]))
            shares = [rng.dirichlet(np.full(count, 0.3)) for count in (classes + 1, classes)]
            masks = rng.choice([*range(classes), IGNORED], (3, 8, 8), p=shares[0]).astype(np.uint8)
            guesses = rng.choice(classes, (3, 8, 8), p=shares[1]).astype(np.uint8)
            evaluator = MaskEvaluator(DrawnMasks(masks, classes), resize="stretch")  # type: ignore[arg-type]
            evaluator.add({"index": np.array([2, 0, 1, 0])}, [{"classes": guesses[index]} for index in (2, 0, 1, 0)])
            ours = evaluator.result([evaluator.partial()])
            known = masks != IGNORED
            if not known.any():
                assert (ours["miou"], ours["pixel_accuracy"]) == (0.0, 0.0)
                continue
            present = sorted(set(masks[known].tolist()) | set(guesses[known].tolist()))
            theirs = jaccard_score(masks[known], guesses[known], labels=present, average=None)
            self.close([ours[f"iou/c{label}"] for label in present], theirs)
            self.close(ours["miou"], theirs.mean())
            given = torch.from_numpy(guesses.astype(int)), torch.from_numpy(masks.astype(int)), classes
            by_class = multiclass_jaccard_index(*given, average="none", ignore_index=IGNORED)
            self.close([ours[f"iou/c{label}"] for label in present], by_class[present], most=1e-6)

    @needs("torchmetrics")
    def test_perplexity_is_that_of_torchmetrics(self) -> None:
        from torchmetrics.functional.text import perplexity

        for rng in draws(11):
            logits = torch.tensor(rng.normal(0, rng.choice([0.1, 1, 20]), (4, 12, 30)))
            labels = torch.tensor(
                np.where(rng.random((4, 12)) < rng.random(), packing.NONE, rng.integers(0, 30, (4, 12)))
            )
            if (labels == packing.NONE).all():
                continue
            sums = network.sums(logits, {"labels": labels}, likelihoods.OfWhole())
            evaluator = TokenEvaluator()
            rows = [tuple(sums[name][row].item() for name in ("nll", "count", "right")) for row in range(4)]
            evaluator.add({"index": np.array([0, 1, 2, 3, 0])}, [*rows, rows[0]])
            ours = evaluator.result([evaluator.partial()])
            self.close(ours["perplexity"], perplexity(logits, labels, ignore_index=packing.NONE), most=1e-10)

    @needs("timm")
    def test_schedules_are_those_of_timm(self) -> None:
        from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler

        for rng in draws(12):
            epochs, first, factor = int(rng.integers(3, 30)), float(rng.uniform(0.001, 1)), float(rng.uniform(0, 0.5))
            warm, power = int(rng.integers(0, epochs)), float(rng.uniform(0.3, 3))
            steps = sorted({int(step) for step in rng.integers(1, epochs + 5, 3)})
            ends = {"t_initial": epochs - warm, "lr_min": first * factor}
            before = {"warmup_t": warm, "warmup_lr_init": 0.0, "warmup_prefix": True}
            for curve, kind, settings in (
                ({"name": "cosine"}, CosineLRScheduler, ends),
                ({"name": "polynomial", "power": power}, PolyLRScheduler, {**ends, "power": power}),
                (
                    {"name": "step", "milestones": steps, "gamma": factor + 0.1},
                    MultiStepLRScheduler,
                    # Of a milestone timm takes the epoch before, torch and mtrain take the epoch itself.
                    {"decay_t": [step + 1 for step in steps], "decay_rate": factor + 0.1},
                ),
            ):
                warmup = {"epochs": warm, "updates": 0, "before_curve": True} if warm else None
                ours = our_rates(epochs, first, {**curve, "final_factor": factor, "warmup": warmup})
                optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=first)
                theirs = kind(optimizer, **settings, **before)
                self.close(
                    [ours(epoch) for epoch in range(epochs + 3)], [theirs._get_lr(e)[0] for e in range(epochs + 3)]
                )

    def test_schedules_are_those_of_torch(self) -> None:
        schedulers = torch.optim.lr_scheduler
        for rng in draws(13):
            epochs, first, factor = int(rng.integers(4, 30)), float(rng.uniform(0.01, 1)), float(rng.uniform(0.01, 0.5))
            power, peak = float(rng.uniform(0.3, 3)), float(rng.uniform(0.2, 0.8))
            steps = sorted(int(step) for step in rng.integers(1, epochs, 3))
            cycle = {"max_lr": first, "total_steps": epochs, "pct_start": peak, "final_div_factor": 1 / (25 * factor)}
            for curve, kind, settings in (
                ({"name": "cosine"}, "CosineAnnealingLR", {"T_max": epochs, "eta_min": first * factor}),
                ({"name": "linear"}, "LinearLR", {"start_factor": 1.0, "end_factor": factor, "total_iters": epochs}),
                ({"name": "polynomial", "power": power}, "PolynomialLR", {"total_iters": epochs, "power": power}),
                ({"name": "exponential"}, "ExponentialLR", {"gamma": factor ** (1 / epochs)}),
                ({"name": "step", "milestones": steps, "gamma": factor}, "MultiStepLR", {"milestones": steps, "gamma": factor}),
                ({"name": "one_cycle", "peak": peak}, "OneCycleLR", cycle),
            ):  # fmt: skip
                end = 0.0 if curve["name"] == "polynomial" else factor
                ours = our_rates(epochs, first, {**curve, "final_factor": end, "warmup": None})
                optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=first)
                theirs = getattr(schedulers, kind)(optimizer, **settings)
                for epoch in range(epochs):
                    self.close(ours(epoch), optimizer.param_groups[0]["lr"], most=1e-9)
                    optimizer.step()
                    if epoch < epochs - 1:
                        theirs.step()


class DrawnMasks:
    """Masks in place of a split's."""

    def __init__(self, masks: Any, classes: int) -> None:
        self.class_names = [f"c{label}" for label in range(classes)]
        self._masks = masks

    def __len__(self) -> int:
        return len(self._masks)

    def size(self, index: int) -> tuple[int, int]:
        """Width and height."""
        height, width = self._masks[index].shape
        return width, height

    def mask(self, index: int, _size_wh: tuple[int, int]) -> Any:
        """The mask."""
        return self._masks[index]


def our_rates(epochs: int, first: float, schedule: dict[str, Any]) -> Any:
    """The rate of an epoch."""
    sections = {"optimizer": {"learning_rate": first}, "schedule": schedule, "train": {"epochs": epochs}}
    rates = Schedule(Spec.model_validate(sections), updates_per_epoch=1, total_updates=epochs)
    return lambda epoch: rates(epoch).learning_rates[-1]


def centres(boxes_N4: Any) -> Any:
    """Boxes as xc, yc, w, h."""
    low, high = boxes_N4[:, :2], boxes_N4[:, 2:]
    return torch.cat(((low + high) / 2, high - low), dim=1)


def keep_exactly(boxes: list[list[int]], threshold: Fraction) -> list[int]:
    """Greedy suppression of boxes in the order of their scores, in exact numbers."""
    kept_places: list[int] = []
    for place, box in enumerate(boxes):
        if all(exact_overlap(boxes[other], box) <= threshold for other in kept_places):
            kept_places.append(place)
    return kept_places


def exact_overlap(one: list[int], other: list[int]) -> Fraction:
    """Intersection over union; 0 where both are empty."""
    width, height = (max(min(one[axis + 2], other[axis + 2]) - max(one[axis], other[axis]), 0) for axis in (0, 1))
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - width * height
    return Fraction(width * height, area) if area else Fraction(0)


def draw_set(rng: np.random.Generator) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A set of images in COCO's form and predictions for it."""
    side = 130
    ids = rng.permutation(1000)[: int(rng.choice([1, 2, 6]))].tolist()
    categories = rng.permutation(90)[: int(rng.choice([1, 2, 5]))].tolist()
    crowd, present = float(rng.choice([0, 0.3, 1], p=[0.4, 0.5, 0.1])), float(rng.choice([0.5, 1]))
    objects: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for image in ids:
        for category in categories:
            boxes = (
                draw_boxes(rng, int(rng.choice([0, 0, 1, 3, 10])), whole=True, side=side)
                if rng.random() < present
                else []
            )
            for box in boxes:
                objects.append(
                    {
                        **in_coco(box),
                        "id": len(objects) + 1,
                        "image_id": image,
                        "category_id": category,
                        "area": float(rng.choice([area_of(box), 32.0**2, 96.0**2])),
                        "iscrowd": int(rng.random() < crowd),
                    }
                )
            found = [box + np.round(rng.normal(0, 3, 4)) * (rng.random() < 0.7) for box in boxes]
            found += list(draw_boxes(rng, int(rng.choice([0, 1, 5, 130])), whole=True, side=side))
            for box in (np.clip(box, 0, side) for box in found):
                if (box[2:] >= box[:2]).all():
                    scored = {
                        "image_id": image,
                        "category_id": category,
                        "score": float(rng.choice([0.1, 0.5, rng.random()])),
                    }
                    entries.append(scored | in_coco(box))
    if rng.random() < 0.1:
        entries = []
    images = [{"id": image, "width": side, "height": side} for image in ids]
    names = [{"id": category, "name": f"c{category}"} for category in categories]
    return {"images": images, "annotations": objects, "categories": names}, entries


def area_of(box: Any) -> float:
    """Width times height."""
    return float((box[2] - box[0]) * (box[3] - box[1]))


def in_coco(box: Any) -> dict[str, Any]:
    """A box in COCO's form."""
    return {"bbox": [*map(float, box[:2]), *map(float, box[2:] - box[:2])]}


def kept(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The predictions that mtrain hands to the evaluation: the best ones of each class and image."""
    left = []
    for image in dict.fromkeys(entry["image_id"] for entry in entries):
        own = [entry for entry in entries if entry["image_id"] == image]
        rows = np.array([[0, 0, 0, place, entry["score"], entry["category_id"]] for place, entry in enumerate(own)])
        left += [own[int(place)] for place in detection.best_of_classes(rows, scoring.COCO_DETECTIONS)[:, 3]]
    return left


def stats_of_pycocotools(truth: dict[str, Any], entries: list[dict[str, Any]]) -> Any:
    """The twelve numbers of COCO's evaluation."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        theirs, found = COCO(), COCO()
        theirs.dataset = {**truth, "annotations": [dict(each) for each in truth["annotations"]]}
        found.dataset = {**truth, "annotations": []}
        theirs.createIndex()
        found.createIndex()
        if entries:
            found = theirs.loadRes([dict(entry) for entry in entries])
        evaluation = COCOeval(theirs, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


if __name__ == "__main__":
    unittest.main()
