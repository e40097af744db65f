"""State dicts as the original programs name and shape them, filled with random numbers."""

import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "data"


def _filled(entries):
    rng = np.random.default_rng(7)
    return {
        name: np.full(shape, 5, np.int64) if dtype == "int64" else rng.standard_normal(shape).astype(dtype)
        for name, shape, dtype in entries
    }


def yolov5(variant="n", *, classes=80):
    """Return arrays with the entries of YOLOv5's published checkpoints."""
    facts = json.loads((DATA / "golden_yolov5" / "facts.json").read_text())[f"yolov5{variant}"]
    entries = {name: (name, shape, dtype) for name, shape, dtype in facts["nc80"]["state_dict"]}
    if classes == 3:
        for name, shape, dtype in facts["nc3"]["state_dict_differs_from_nc80"]:
            entries[name] = (name, shape, dtype)
    return _filled(entries.values())


def ppyoloe(size="s"):
    """Return arrays with the entries of PaddleDetection's published PP-YOLOE."""
    facts = json.loads((DATA / "golden_ppyoloe" / "state_dicts" / f"ppyoloe_crn_{size}_nc80.json").read_text())
    arrays = _filled((name, shape, "float32") for name, shape, *_ in facts["entries"])
    arrays["yolo_head.proj_conv.weight"] = np.arange(17, dtype=np.float32).reshape(1, 17, 1, 1)
    return arrays


def equal(result, expected):
    """Names, types, shapes and bits."""
    assert set(result) == set(expected)
    different = [
        name
        for name, array in expected.items()
        if result[name].dtype != array.dtype
        or result[name].shape != array.shape
        or result[name].tobytes() != np.asarray(array, order="C").tobytes()
    ]
    assert different == []
