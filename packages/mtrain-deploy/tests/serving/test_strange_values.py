"""Values of requests that no type holds, and files that are replaced while a server looks at them, without a server."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain_deploy.serving import reloading
from mtrain_deploy.serving.metrics import Metrics
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


def test_a_file_that_is_still_being_copied_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows between the two looks; then it stays, is opened once, and one that cannot be opened changes nothing."""
    file = tmp_path / "x.onnx"
    file.write_bytes(b"old")
    looks, opened, served = [0], [], []
    sizes = [b"n", b"ne", b"new", b"new", b"new", b"new"]  # what each look after the first finds
    mark = reloading._mark

    def look(path: Path) -> Any:
        if looks[0] and looks[0] <= len(sizes):
            path.write_bytes(sizes[looks[0] - 1])
            os.utime(path, ns=(0, len(sizes[looks[0] - 1])))
        looks[0] += 1
        return mark(path)

    def open_now() -> Any:
        opened.append(file.read_bytes())
        if opened[-1] == b"bad":
            raise ValueError(opened[-1])
        return opened[-1]

    async def replace(model: Any) -> None:
        served.append(model)

    async def watch() -> None:
        watching = asyncio.ensure_future(
            reloading.reload_when_new(reloading.Watched(file, open_now), replace, Metrics(), poll_s=0.001)
        )
        while looks[0] < 12:
            await asyncio.sleep(0.001)
        file.write_bytes(b"bad")
        while not opened[1:]:
            await asyncio.sleep(0.001)
        file.unlink()
        seen = looks[0]
        while looks[0] < seen + 4:
            await asyncio.sleep(0.001)
        watching.cancel()

    monkeypatch.setattr(reloading, "_mark", look)
    asyncio.run(asyncio.wait_for(watch(), 30))
    assert opened == [b"new", b"bad"]
    assert served == [b"new"]
