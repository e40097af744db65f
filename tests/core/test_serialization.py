"""Values that ranks send each other as bytes: they come back unchanged, and no code is called."""

import collections
import dataclasses
import os
import pickle
import subprocess
from typing import Any

import numpy as np
import pytest

from mtrain.core.ranks import serialization
from mtrain.errors import TrainingError


class Runs:
    """A hostile pickle that runs code."""

    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


@dataclasses.dataclass
class Metrics:
    """A value that a plugin's evaluator may send."""

    found: dict[int, Any]


class TestValues:
    """Bytes of another rank are data."""

    @pytest.mark.parametrize(
        "value",
        [
            None, True, 1, 2**70, 1.5, float("inf"), "text", b"bytes", [1, (2, {"a": {3}})], frozenset({1}), 1j, slice(1, 2),
            collections.OrderedDict(a=1), collections.Counter("aab"), np.float32(1.5), np.int64(3), np.dtype("float32"),
            Metrics(found={1: "x"}),
        ],
    )  # fmt: skip
    def test_values_come_back_as_they_were(self, value):
        assert serialization.unpack(serialization.pack(value)) == value

    @pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.zeros((0, 6), "float32"), np.array(["a", "b"])])
    def test_arrays_come_back_as_they_were(self, array):
        back = serialization.unpack(serialization.pack({"found": array}))["found"]
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)

    @pytest.mark.parametrize(
        "content",
        [
            pickle.dumps(Runs()),
            pickle.dumps(subprocess.Popen),
            pickle.dumps(eval),
            b"cos\nsystem\n(S'touch owned'\ntR.",
            b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'__class__'\ntR.",
            b"not at all",
            b"",
        ],
    )
    def test_nothing_is_called_that_is_no_data(self, content, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(TrainingError, match="another rank sent"):
            serialization.unpack(content)
        assert not list(tmp_path.iterdir())
