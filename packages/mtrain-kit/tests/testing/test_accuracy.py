"""The check of the first update: what it compares with is right, and solo passes it."""

import numpy as np
import pytest

from mtrain.core.interfaces import Array
from mtrain_kit import accuracy
from mtrain_kit.check_context import FIRST_UPDATE, Reference, Site
from mtrain_kit.checks import Measure
from tests.framework import Framework


@pytest.fixture(scope="module")
def measures(framework: Framework, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measure]:
    """Return the measures of solo by their first word."""
    references = tmp_path_factory.mktemp("references")
    framework.one_thread()
    with framework.solo() as session:
        exact = accuracy.first_update(session, "fp64")
        np.savez(Reference(folder=references, precision="fp64").file(FIRST_UPDATE), **exact)  # type: ignore[arg-type]
        actual = accuracy.near_float64(Site(session=session, ranks=1, references=references))
    assert float(exact["loss"]) == pytest.approx(loss(), rel=1e-12)
    return {measure.what.partition(":")[0]: measure for measure in actual}


def loss() -> float:
    """The loss of the first update in numpy."""
    weights = {name: array.astype(np.float32).astype(np.float64) for name, array in accuracy.start_weights().items()}
    images = np.pad(accuracy.images().astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(2, 3))
    x = np.einsum("bihwyx,oiyx->bhwo", windows, weights["conv.weight"], optimize=True)
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5) * weights["bn.weight"] + weights["bn.bias"]
    x = x / (1 + np.exp(-x))
    values: Array = x @ weights["head.weight"].reshape(-1) + weights["head.bias"]
    return float(np.square(values).mean())


def test_solo_is_as_near_to_float64_as_promised_and_far_from_the_bound(measures: dict[str, Measure]) -> None:
    print({word: measure.value for word, measure in measures.items()})
    assert list(measures) == ["loss", "gradient norm"]
    assert all(measure.ok for measure in measures.values()), measures
    assert all(measure.value < measure.bound / 5 for measure in measures.values()), measures


def test_the_message_has_both_numbers(measures: dict[str, Measure]) -> None:
    for measure in measures.values():
        single, double = (float(part.split()[0]) for part in measure.detail.split(", "))
        assert single == pytest.approx(double, rel=1e-5)
        assert measure.detail.endswith(" in float64")


def test_the_images_are_bright_and_low_in_contrast() -> None:
    images = accuracy.images()
    np.testing.assert_allclose(images.mean((0, 2, 3)), accuracy.BRIGHTNESS, atol=0.02)
    # A cosine, a sine of 0.6 and noise of 0.3 have the variances 1/2, 0.36/2 and 0.09.
    expected = accuracy.CONTRAST * np.sqrt(0.5 + 0.18 + 0.09)
    np.testing.assert_allclose(images.std((2, 3)), expected, rtol=0.25)
    np.testing.assert_allclose(images * 255, np.round(images * 255), atol=1e-4)
