"""Where channels lie after a function: every number of a channel is its identity, so the values say it themselves."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.core import ops
from mtrain_deploy.pruning.channels import FIXED, Channels
from mtrain_deploy.pruning.traced import Traced, tracing
from tests.framework import Framework

CHANNELS = 5
FOLLOWED: Mapping[str, Callable[[Any], Any]] = {
    "squeeze before": lambda x: ops.squeeze(x, 0),
    "squeeze after": lambda x: ops.squeeze(ops.permute_dims(x, (1, 2, 3, 0)), 3),
    "squeeze from the end": lambda x: ops.squeeze(ops.expand_dims(x, 4), -1),
    "expand before": lambda x: ops.expand_dims(x, 1),
    "expand after": lambda x: ops.expand_dims(x, 2),
    "expand from the end": lambda x: ops.expand_dims(x, -1),
    "permute": lambda x: ops.permute_dims(x, (2, 3, 0, 1)),
    "mean of an axis before": lambda x: ops.mean(x, axis=0),
    "mean of axes around": lambda x: ops.mean(x, axis=(0, 2, 3)),
    "mean that keeps its axes": lambda x: ops.mean(x, axis=(2, 3), keepdims=True),
    "reshape after": lambda x: ops.reshape(x, (1, x.shape[1], -1)),
    "reshape before": lambda x: ops.reshape(x, (-1, 6)),
    "index before": lambda x: x[0],
    "index after": lambda x: x[:, :, 1],
    "index from the end": lambda x: x[..., 1],
    "index with a new axis": lambda x: x[:, None, :, 0],
    "slice": lambda x: x[:, :, 1:],
    "concat of another axis": lambda x: ops.concat([x, x], 2),
    "plus a number": lambda x: x + 0.0,
    "times one for each column": lambda x: x * ops.ones_like(x.value[:, :1]),
}
FIXED_BY: Mapping[str, Callable[[Any], Any]] = {
    "mean over channels": lambda x: ops.mean(x, axis=1),
    "softmax over channels": lambda x: ops.softmax(x, 1),
    "part of the channels": lambda x: x[:, 1:],
    "reshape that merges channels": lambda x: ops.reshape(x, (1, -1)),
    "plus an array with a number for each channel": lambda x: x + x.value,
}


def traced(framework: Framework, channels: Channels) -> Traced:
    """Images (1, C, 2, 3) in which each channel holds its identity."""
    ids = channels.new(CHANNELS)
    values = np.broadcast_to(ids.reshape(1, CHANNELS, 1, 1), (1, CHANNELS, 2, 3)).astype(np.float32)
    return Traced(framework.tensor(values.copy()), 1, ids, channels)


def lies_as_it_says(found: Traced) -> None:
    """Compare the identities along the axis with the values there."""
    values = np.moveaxis(ops.to_numpy(found.value), found.axis, 0)
    assert len(values) == len(found.ids)
    for number, part in zip(found.ids, values, strict=True):
        np.testing.assert_array_equal(part, np.full_like(part, number))


@pytest.mark.parametrize("name", FOLLOWED)
def test_channels_lie_where_the_trace_says(framework: Framework, name: str) -> None:
    channels = Channels()
    x = traced(framework, channels)
    with tracing():
        found = FOLLOWED[name](x)
    lies_as_it_says(found)
    assert FIXED not in channels.roots(x.ids), "they can still be removed"


@pytest.mark.parametrize("name", FIXED_BY)
def test_channels_that_are_mixed_must_stay(framework: Framework, name: str) -> None:
    channels = Channels()
    x = traced(framework, channels)
    with tracing():
        FIXED_BY[name](x)
    assert set(channels.roots(x.ids).tolist()) == {FIXED}


def test_joined_channels_keep_their_order_and_added_ones_go_together(framework: Framework) -> None:
    channels = Channels()
    one, other = traced(framework, channels), traced(framework, channels)
    with tracing():
        lies_as_it_says(ops.concat([one, other], 1))
        assert not set(channels.roots(one.ids)) & set(channels.roots(other.ids))
        _ = one + other
    np.testing.assert_array_equal(channels.roots(one.ids), channels.roots(other.ids))


def test_the_parts_of_a_split_lose_channels_at_the_same_places(framework: Framework) -> None:
    channels = Channels()
    x = traced(framework, channels)
    with tracing():
        joined = ops.concat([x, traced(framework, channels)], 1)
        first, second = ops.split(joined, [joined.shape[1] // 2, joined.shape[1] // 2], axis=1)
    np.testing.assert_array_equal(first.ids, x.ids)
    lies_as_it_says(first)
    lies_as_it_says(second)
    np.testing.assert_array_equal(channels.roots(first.ids), channels.roots(second.ids))
