"""The file beside a Paddle program from which PaddleDetection's deployment scripts learn what to do with an image."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mtrain.spec import outputs

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

INFER_CONFIG = "infer_cfg.yml"
"""Its name; the program beside it must be called ``model``."""
_ARCHITECTURES = {"yolov5": "YOLOv5", "ppyoloe": "PPYOLOE"}
"""Names that the scripts know, by the begin of the name of a model."""
_LINEAR = 1
"""Number of linear interpolation in OpenCV."""


def infer_config(loaded: "Loaded", facts: Mapping[str, Any], *, dynamic_size: bool) -> dict[str, Any]:
    """Return the content of ``infer_cfg.yml`` for a detector with suppression inside.

    A letterbox has its image at the top left, where mtrain puts it in the middle: the scripts know no other one whose boxes
    they place.
    """
    model, side = loaded.spec.model.name, facts["image_size"]
    fits = loaded.job.task_named(facts["kind"]).preprocessing(loaded.spec)
    letterbox = fits["resize"] == "letterbox"
    steps: list[dict[str, Any]] = [
        {"type": "Resize", "target_size": [side, side], "keep_ratio": letterbox, "interp": _LINEAR}
    ]
    if letterbox:
        steps.append({"type": "Pad", "size": [side, side], "fill_value": [float(fits["fill"])] * 3})
    scaled = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0], "norm_type": "none", "is_scale": True}
    steps += [{"type": "NormalizeImage", **scaled}, {"type": "Permute"}]
    known = (name for start, name in _ARCHITECTURES.items() if model.startswith(start))
    return {
        "mode": "paddle",
        "draw_threshold": 0.5,
        "metric": "COCO",
        "use_dynamic_shape": dynamic_size,
        "arch": next(known, "YOLO"),
        "min_subgraph_size": 3,
        "Preprocess": steps,
        "label_list": list(facts["class_names"]),
    }


def write_yaml(path: Path, values: Mapping[str, Any]) -> Path:
    """Write values as YAML, in their order; return the path."""
    outputs.write_text(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))
    return path
