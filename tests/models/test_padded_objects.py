"""PP-YOLOE's objects are padded to numbers that repeat, and hardly more than there are: what its assigners' memory grows with."""

import numpy as np

from mtrain.models.ppyoloe.truth import group_rows, rows_for


def test_rows_are_at_most_an_eighth_more_than_objects_and_take_few_values() -> None:
    rows = [rows_for(count) for count in range(1, 1025)]
    assert all(count <= n < count * 9 / 8 + 1 / 8 for count, n in enumerate(rows, start=1))
    assert rows == sorted(rows)
    # Eight between each power of two and the next one: 1024 counts in 8 octaves, and those below 8 alone.
    assert len(set(rows)) == 8 + 8 * 7
    assert rows_for(0) == 1


def test_micro_batches_of_changing_objects_have_few_shapes() -> None:
    random, shapes, fullest = np.random.default_rng(0), set(), set()
    for _ in range(200):
        counts = random.poisson(random.uniform(5, 60), size=8)
        images = np.repeat(np.arange(8), counts)
        rows = np.concatenate([images[:, None], random.random((len(images), 5))], axis=1).astype(np.float32)
        labels, boxes = group_rows(rows, shape=(8, 640, 640))
        assert labels.shape == boxes.shape[:2]
        assert counts.max() <= labels.shape[1] <= counts.max() * 9 / 8
        shapes.add(labels.shape)
        fullest.add(int(counts.max()))
    print(f"{len(shapes)} shapes of {len(fullest)} largest numbers of objects")
    assert len(shapes) < len(fullest) / 2
