"""Training images that are drawn by the classes of their boxes: weights, and repetitions of one image."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain.core.interfaces import HostBatch
from mtrain.core.samples.sampler import Drawn
from mtrain.errors import DataError
from mtrain.rank.spec.draws import DrawingLoader, Draws
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.image_weights import ImageWeights
from mtrain.tasks.detection.section import AugmentSpec
from mtrain.tasks.detection.source import DetectionSource


def with_labels(annotations: Annotations, labels: list[list[int]]) -> Annotations:
    """Return the annotations with boxes of these classes in each image."""
    samples = [
        replace(
            sample,
            labels=np.array(own, dtype=np.int64),
            boxes=np.tile(np.float32([1, 1, 9, 9]), (len(own), 1)),
            crowd=np.zeros(len(own), dtype=bool),
            area=np.full(len(own), 64.0),
        )
        for sample, own in zip(annotations.samples, labels, strict=True)
    ]
    return replace(annotations, samples=samples)


def test_a_weight_is_the_sum_over_boxes_of_what_their_classes_lack(annotations: Annotations) -> None:
    labelled = with_labels(annotations, [[0], [0, 0], [0, 1], [], *[[0]] * 8])
    weights = ImageWeights(labelled)
    first = weights.at({})
    assert first[:4] == pytest.approx([1 / 12, 2 / 12, 1 / 12 + 1, 0.0])
    later = weights.at({"AP": 0.3, "AP/left": 0.8, "AP/right": 0.5})
    assert later[:4] == pytest.approx([0.04 / 12, 0.08 / 12, 0.04 / 12 + 0.25, 0.0])
    # A class that the evaluation split lacks has the mean over the others; one without a mistake keeps a little.
    assert weights.at({"AP": 0.5, "AP/left": 0.5})[2] == pytest.approx(0.25 / 12 + 0.25)
    assert weights.at({"AP": 1.0, "AP/left": 1.0, "AP/right": 1.0})[0] == pytest.approx(1e-4 / 12)
    # -1 is the metric of nothing to measure.
    assert weights.at({"AP": -1.0})[2] == pytest.approx(1 / 12 + 1)


def test_images_without_a_box_cannot_be_drawn(one_image: tuple[object, Annotations]) -> None:
    with pytest.raises(DataError, match="no training image has a box"):
        ImageWeights(one_image[1])


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
def test_repetitions_of_an_image_are_augmented_differently(resize: str, annotations: Annotations) -> None:
    augment = AugmentSpec() if resize == "letterbox" else AugmentSpec(mosaic=0.0, translate=0.0, scale=0.0)
    source = DetectionSource(annotations, image_size=64, resize=resize, augment=augment, seed=3)  # type: ignore[arg-type]
    images = [source.sample(2, 5 + k * len(source)) for k in range(3)]
    assert [one.index for one in images] == [5, 5, 5]
    images = [one.image for one in images if one.image is not None]
    assert not any(np.array_equal(images[i], images[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert source.describe(5 + len(source)) == source.describe(5)


class Data:
    """Weights that are the metrics themselves."""

    def sample_weights(self, metrics: dict[str, float]) -> np.ndarray:
        return np.array([metrics.get(str(i), 1.0) for i in range(4)])


class Counting:
    """A loader whose batches are the indices that it asks for."""

    updates_per_epoch = 4

    def __init__(self, order: Drawn) -> None:
        self.order = order

    def micro_batches(self, epoch: int, start: int = 0):
        for update in range(start, 4):
            yield {"index": self.order.global_batch_indices(epoch, update)}

    def close(self) -> None:
        pass


def made() -> tuple[Draws, DrawingLoader]:
    draws = Draws(Data(), Drawn(4, global_batch=1, seed=0))  # type: ignore[arg-type]
    return draws, DrawingLoader(Counting(draws.order), draws)  # type: ignore[arg-type]


def drawn(batches: list[HostBatch]) -> list[int]:
    return [int(batch["index"][0]) % 4 for batch in batches]


def test_an_evaluation_changes_the_next_epoch_and_not_the_current_one() -> None:
    draws, loader = made()
    before = drawn(list(loader.micro_batches(0)))
    batches = loader.micro_batches(0)
    half = [next(batches), next(batches)]
    draws.take_metrics({"0": 0.0, "1": 0.0, "2": 0.0})
    assert drawn([*half, *batches]) == before
    assert drawn(list(loader.micro_batches(1))) == [3, 3, 3, 3]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_resumed_job_draws_what_an_undisturbed_one_does(at: int) -> None:
    draws, loader = made()
    draws.take_metrics({"1": 0.0})
    whole = drawn(list(loader.micro_batches(1)))
    draws.take_metrics({"2": 0.0, "0": 9.0})  # in mid-epoch, or after its last update
    state = draws.state()
    following = drawn(list(loader.micro_batches(2)))
    again, resumed = made()
    again.restore(state)
    if at < 4:
        assert drawn(list(resumed.micro_batches(1, at))) == whole[at:]
    assert drawn(list(resumed.micro_batches(2))) == following
    assert 2 not in following
