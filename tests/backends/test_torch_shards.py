"""Where the stretches of a rank's part lie in the flattened array."""

import pytest
import torch

from mtrain.backends._torch.sharded.shards import Box, Boxes, held_by, runs

BOXES: list[tuple[tuple[int, ...], Box]] = [
    ((6, 4), ((2, 5), (0, 4))),
    ((6, 4), ((0, 6), (1, 3))),
    ((6, 4), ((2, 5), (1, 3))),
    ((3, 4, 5), ((0, 3), (1, 3), (0, 5))),
    ((3, 4, 5), ((1, 2), (1, 3), (2, 5))),
    ((3, 4, 5), ((1, 3), (0, 4), (0, 5))),
    ((7,), ((2, 7),)),
    ((7,), ((0, 7),)),
    ((3, 2), ((3, 3), (0, 2))),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "box"), BOXES)
def test_the_runs_of_a_box_are_its_elements_in_order(shape: tuple[int, ...], box: Box) -> None:
    whole = torch.arange(max(torch.Size(shape).numel(), 0)).view(shape)
    layout = Boxes((box, box), (True, False))
    found = [place for first, end in runs(0, layout, shape) for place in range(first, end)]
    assert found == held_by(0, layout, whole).reshape(-1).tolist()
    assert list(runs(1, layout, shape)) == [], "the first rank that holds a box contributes it"


def test_a_span_is_one_run() -> None:
    assert [list(runs(rank, ((0, 5), (5, 5), (5, 12)), (3, 4))) for rank in range(3)] == [[(0, 5)], [], [(5, 12)]]
