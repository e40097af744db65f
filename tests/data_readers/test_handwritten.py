"""scikit-learn's handwritten digits are read without importing scikit-learn."""

import subprocess
import sys

import numpy as np
import pytest

from mtrain.data.images import handwritten


@pytest.mark.parametrize("file", [handwritten.FILE, ("elsewhere",)], ids=["by mtrain", "by scikit-learn"])
def test_the_digits_are_those_of_scikit_learn(monkeypatch, file):
    from sklearn.datasets import load_digits

    monkeypatch.setattr(handwritten, "FILE", file)
    images, classes = handwritten.handwritten_digits()
    expected = load_digits()
    assert images.dtype == expected.images.dtype
    np.testing.assert_array_equal(images, expected.images)
    np.testing.assert_array_equal(classes, expected.target)


@pytest.mark.job
def test_reading_the_digits_does_not_import_scikit_learn():
    program = (
        "import sys; from mtrain.data.images.handwritten import handwritten_digits; handwritten_digits();"
        "print({'sklearn', 'scipy', 'pandas'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
