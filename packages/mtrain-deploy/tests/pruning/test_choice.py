"""Which channels go, by scores that were computed by hand on a network of two convolutions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from mtrain.core.interfaces import Array
from mtrain_deploy.commands import prune
from mtrain_deploy.pruning.channels import Channels
from mtrain_deploy.pruning.network import Prunable, least_important, mask, shrink
from mtrain_deploy.pruning.scores import By, scores_of
from mtrain_deploy.pruning.tracing import Layer, Trace

FIRST, SECOND = [1, 2, 3, 4], [5, 6]
"""Sets of the channels that ``a`` writes, and of those that ``b`` writes."""


def network() -> Prunable:
    """Three images' channels -> a -> a.bn -> b -> head; a and b have 4 and 2 channels, on 10 positions."""
    channels = Channels()
    first, second = channels.new(4), channels.new(2)
    fixed = channels.new_fixed(3)

    def layer(kind: str, inputs: Array, outputs: Array) -> Layer:
        return Layer(kind=kind, groups=1, kernel=1, inputs=inputs, outputs=outputs, positions=10)

    layers = {
        "a": layer("Conv2d", fixed, first),
        "a_bn": layer("BatchNorm2d", first, first),
        "b": layer("Conv2d", first, second),
        "head": layer("Conv2d", second, fixed),
    }
    return Prunable(Trace(channels=channels, layers=layers))


def weights() -> dict[str, Array]:
    """The mean absolute filters are (4, 1, 3, 2) of ``a`` and (10, 30) of ``b``; the scales are (.3, .9, .1, .2)."""
    a = np.array([[4, -4, 4], [1, 1, -1], [-3, 3, 3], [2, 2, 2]], np.float32)[..., None, None]
    b = np.array([[10, -10, 10, 10], [30, 30, -30, 30]], np.float32)[..., None, None]
    return {
        "a.weight": a,
        "a_bn.weight": np.array([0.3, -0.9, 0.1, 0.2], np.float32),
        "a_bn.bias": np.array([1.0, 0.0, 2.0, -1.0], np.float32),
        "a_bn.running_mean": np.arange(4, dtype=np.float32),
        "a_bn.running_var": np.arange(1, 5, dtype=np.float32),
        "b.weight": b,
        "b.bias": np.array([0.5, 0.25], np.float32),
        "head.weight": np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1),
    }


def gradients() -> Iterator[Mapping[str, Array]]:
    """Two updates, with gradients of scale and shift of ``a_bn`` and of the filters of ``b``."""
    for scale in (1.0, 2.0):
        yield {
            "a.weight": np.full((4, 3, 1, 1), 99.0, np.float32),  # covered by its BatchNorm
            "a_bn.weight": scale * np.array([1, 1, 10, 0], np.float32),
            "a_bn.bias": scale * np.array([0.7, 5, -0.5, 0.1], np.float32),
            "b.weight": scale * np.array([[0.1, 0.1, 0, 0], [0.01, 0, 0, 0]], np.float32)[..., None, None],
            "b.bias": scale * np.array([1, 2], np.float32),
        }


EXPECTED: Mapping[By, Mapping[int, float]] = {
    "l1": {1: 1.6, 2: 0.4, 3: 1.2, 4: 0.8, 5: 0.5, 6: 1.5},
    "bn": {1: 0.3, 2: 0.9, 3: 0.1, 4: 0.2},
    # (.3 + .7, -.9, 1 - 1, -.1) and (1 - 1 + .5, .3 + .5): squared, times 1^2 + 2^2
    "taylor": {1: 5.0, 2: 4.05, 3: 0.0, 4: 0.05, 5: 1.25, 6: 3.2},
}


@pytest.mark.parametrize("by", EXPECTED)
def test_scores_are_those_computed_by_hand(by: By) -> None:
    assert scores_of(network(), weights(), by, gradients) == pytest.approx(dict(EXPECTED[by]), rel=1e-6, abs=1e-6)


def test_the_least_important_channels_go_first() -> None:
    scores = scores_of(network(), weights(), "l1", gradients)
    assert network().flops() == 2 * 10 * (3 * 4 + 4 * 2 + 2 * 3)
    # By score: 2 (.4), 5 (.5), 4 (.8), 3 (1.2); one set of each group stays, and that is the most important one.
    assert network().select(scores, 1.0) == []
    assert network().select(scores, 21 / 26) == [2]
    assert network().select(scores, 20 / 26) == [2, 5]
    assert network().select(scores, 7 / 26) == [2, 5, 4, 3]
    assert least_important(network().groups[0], scores, 2) == [2, 4]
    assert least_important(network().groups[0], scores, 9) == [2, 4, 3]


def test_the_smaller_network_has_the_arrays_of_the_channels_that_stay() -> None:
    small = shrink(network(), weights(), [2, 5])
    before = weights()
    expected = {
        "a.weight": before["a.weight"][[0, 2, 3]],
        "b.weight": before["b.weight"][[1]][:, [0, 2, 3]],
        "b.bias": before["b.bias"][[1]],
        "head.weight": before["head.weight"][:, [1]],
        **{name: before[name][[0, 2, 3]] for name in before if name.startswith("a_bn")},
    }
    assert small.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(small[name], array, err_msg=name)
    assert network().sizes([2, 5]) == {"a": [3, 3], "a_bn": [3], "b": [3, 1], "head": [1, 3]}


def test_the_masked_network_has_zeros_and_its_statistics() -> None:
    masked = mask(network(), weights(), [2, 5])
    assert np.flatnonzero(masked["a_bn.weight"] == 0).tolist() == [1]
    assert np.flatnonzero((masked["a.weight"] == 0).all(axis=(1, 2, 3))).tolist() == [1]
    assert np.argwhere(masked["b.weight"][:, :, 0, 0] == 0).tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 1]]
    np.testing.assert_array_equal(masked["a_bn.running_var"], weights()["a_bn.running_var"])


def grouped() -> Prunable:
    """``a`` writes 4 channels for ``deep``, which filters each by 9 numbers; ``up`` reads them and writes 3 for ``out``."""
    channels = Channels()
    first, second, fixed = channels.new(4), channels.new(3), channels.new_fixed(2)

    def layer(kind: str, inputs: Array, outputs: Array, *, kernel: int = 1, groups: int = 1) -> Layer:
        return Layer(kind=kind, groups=groups, kernel=kernel, inputs=inputs, outputs=outputs, positions=10)

    layers = {
        "a": layer("Conv2d", fixed, first),
        "deep": layer("Conv2d", first, first, kernel=9, groups=4),
        "up": layer("ConvTranspose2d", first, second, kernel=4),
        "out": layer("Conv2d", second, fixed),
    }
    return Prunable(Trace(channels=channels, layers=layers))


def grouped_weights() -> dict[str, Array]:
    """The mean absolute filters are (1, 2, 3, 4) of ``a``, (4, 3, 2, 9) of ``deep`` and (2.5, 25, 250) of ``up``."""
    columns = np.array([[1, 10, 100], [-2, -20, 200], [3, 30, -300], [4, -40, 400]], np.float32)
    return {
        "a.weight": np.array([[1, -1], [2, 2], [-3, 3], [4, 4]], np.float32)[..., None, None],
        "deep.weight": np.array([4, -3, 2, -9], np.float32).reshape(4, 1, 1, 1) * np.ones((4, 1, 3, 3), np.float32),
        "up.weight": columns[..., None, None] * np.ones((4, 3, 2, 2), np.float32),
        "out.weight": np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1),
    }


def test_a_depthwise_convolution_is_counted_with_one_filter_for_each_channel_that_is_left() -> None:
    assert grouped().flops() == 2 * 10 * (2 * 4 + 9 * 4 + 4 * 4 * 3 + 3 * 2)
    assert grouped().flops([1, 5]) == 2 * 10 * (2 * 3 + 9 * 3 + 4 * 3 * 2 + 2 * 2)


def test_channels_of_a_transposed_convolution_are_its_second_axis() -> None:
    scores = scores_of(grouped(), grouped_weights(), "l1", gradients)
    # Of ``a`` and ``deep`` the mean of both, (2.5, 2.5, 2.5, 6.5); each divided by the mean of its group.
    assert scores == pytest.approx(
        {1: 2.5 / 3.5, 2: 2.5 / 3.5, 3: 2.5 / 3.5, 4: 6.5 / 3.5, 5: 2.5 / 92.5, 6: 25 / 92.5, 7: 250 / 92.5}
    )
    before, small = grouped_weights(), shrink(grouped(), grouped_weights(), [1, 5])
    np.testing.assert_array_equal(small["deep.weight"], before["deep.weight"][[1, 2, 3]])
    np.testing.assert_array_equal(small["up.weight"], before["up.weight"][1:, 1:])
    np.testing.assert_array_equal(small["out.weight"], before["out.weight"][:, 1:])
    assert grouped().sizes([1, 5]) == {"a": [2, 3], "deep": [3, 3], "up": [3, 2], "out": [2, 2]}


def test_the_gradient_of_a_transposed_convolution_is_taken_by_its_second_axis() -> None:
    update = {"up.weight": np.array([[1, 0, 0], [0, 0, 0], [0, 0.5, 0], [0, 0, 0]], np.float32)[..., None, None]}
    scores = scores_of(grouped(), grouped_weights(), "taylor", lambda: iter([{**update}]))
    assert {number: scores[number] for number in (5, 6, 7)} == pytest.approx(
        {5: 4.0**2, 6: (4 * 30 * 0.5) ** 2, 7: 0.0}
    )


def test_the_spec_of_a_smaller_network_has_no_key_of_the_file_that_its_job_began_with(tmp_path: Path) -> None:
    work = tmp_path / prune.WORK_FOLDER
    work.mkdir()
    (work / prune.WEIGHTS).touch()
    loaded: Any = SimpleNamespace(values={"model": {"name": "net", "weights": "w.pt", "weights_key": "teacher"}})
    prune._write(tmp_path, loaded, {"sizes": {"a": [1]}})
    model = yaml.safe_load((tmp_path / prune.SPEC).read_text())["model"]
    assert model["weights_key"] is None
    assert (model["weights"], model["pruned"]) == (str(tmp_path / prune.WEIGHTS), {"a": [1]})
