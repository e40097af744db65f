"""Values of requests that no type holds, and files that are replaced while a server looks at them, without a server."""

import json

import numpy as np
import pytest

from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.tensors import _TYPES, TensorType, inference

WHOLE = [name for name in _TYPES if np.dtype(name).kind in "iu"]


def read(dtype: str, data: str) -> np.ndarray:
    count = len(json.loads(data))
    row = {"name": "x", "datatype": _TYPES[dtype], "shape": [count]}
    content = json.dumps({"inputs": [row]})[:-3] + f', "data": {data}}}]}}'
    return np.asarray(inference(content.encode(), None, inputs=[TensorType("x", dtype, (-1,))], outputs=[]).arrays["x"])


@pytest.mark.parametrize("dtype", WHOLE)
def test_integers_at_both_ends_of_a_type_are_taken_and_those_beyond_are_not(dtype: str) -> None:
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    found = read(dtype, json.dumps([least, most]))
    assert (found.dtype, found.tolist()) == (np.dtype(dtype), [least, most])
    for beyond in (least - 1, most + 1, -(2**70), 2**70, 10**400):
        for data in ([beyond], [0, beyond], [beyond, 0]):
            with pytest.raises(Refusal, match="expected"):
                read(dtype, json.dumps(data))


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("float32", "[1e300]"), ("float32", "[0, -1e39]"), ("float16", "[70000]"), ("float64", "[1e400]"), ("float64", "[-1e400]"),
        ("float32", "[NaN]"), ("float32", "[Infinity]"), ("bool", "[2]"), ("bool", "[-1]"), ("bool", "[0.5]"), ("uint8", "[-1]"),
        ("uint8", "[1e2]"), ("int64", "[0.0]"), ("float32", '["1"]'), ("float32", "[null]"), ("int32", "[[1], [2, 3]]"),
    ],
)  # fmt: skip
def test_a_value_that_a_type_does_not_hold_is_refused(dtype: str, data: str) -> None:
    with pytest.raises(Refusal, match="expected"):
        read(dtype, data)


def test_values_that_a_type_holds_are_taken() -> None:
    assert read("bool", "[true, false, 1, 0]").tolist() == [True, False, True, False]
    assert read("float32", "[-0.0, 3e38, 1]").tolist() == np.float32([-0.0, 3e38, 1]).tolist()
    assert read("float16", "[65504, -65504]").tolist() == [65504, -65504]
