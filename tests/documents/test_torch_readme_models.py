"""The numbers of parameters in README.md are those of the networks, with the classes of COCO or ImageNet."""

import re

import pytest
import torch

from mtrain.core.interfaces import Task
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from scripts.site.documents import ROOT
from tests.framework import Framework

ROWS = dict(
    re.findall(r"^\| ([^|]+?) \| ([\d., ;]+) \| [^|]+ \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
)
NAMES = {
    "YOLOv5 n, s, m, l, x": [f"yolov5{size}" for size in "nsmlx"],
    "PP-YOLOE and PP-YOLOE+ s, m, l, x": [f"ppyoloe_{size}" for size in "smlx"],
    "ResNet 18, 34, 50; ViT tiny, small, base": [
        *("resnet18", "resnet34", "resnet50"),
        *("vit_tiny", "vit_small", "vit_base"),
    ],
    "U-Net, `liteseg`": ["unet", "liteseg"],
}
CLASSES = {"detection": 80, "classification": 1000, "segmentation": 21}
SIDES = {"detection": 640, "classification": 224, "segmentation": 512}


def millions(name: str) -> float:
    """Trained parameters of a model as it comes; arrays are not allocated."""
    plugin = plugins.load("models", name)(Registry.read().options("models", name, {}, path=""))
    classes = tuple(f"class {number}" for number in range(CLASSES[plugin.kind]))
    task = Task(kind=plugin.kind, class_names=classes, image_size=SIDES[plugin.kind], global_batch=8)
    with torch.device("meta"):
        network = plugin.build(plugin.prepare_task(task, {}), None)
    return sum(parameter.numel() for parameter in network.parameters()) / 1e6


@pytest.mark.parametrize("row", NAMES)
def test_the_readme_has_the_number_of_parameters_of_each_model(row: str, framework: Framework) -> None:
    stated = [float(number) for number in re.split(r"[,;] ", ROWS[row])]
    assert stated == [pytest.approx(millions(name), abs=0.06) for name in NAMES[row]]
