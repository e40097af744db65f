"""Fixtures of the model tests: a bound framework and the golden numbers."""

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.models.yolov5 import model
from tests.framework import Framework

FOLDER = Path(__file__).parents[1] / "data" / "golden_yolov5"


@pytest.fixture(scope="session", autouse=True)
def bound_framework(framework: Framework) -> None:
    framework.one_thread()


def _spec() -> ModuleType:
    location = importlib.util.spec_from_file_location("golden_yolov5_spec", FOLDER / "spec.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


@dataclass(eq=False)
class Golden:
    """The stored numbers, and networks filled with the weights they belong to."""

    folder: Path
    spec: ModuleType
    framework: Framework

    @cached_property
    def facts(self) -> dict[str, Any]:
        return self.json("facts")

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{name}.npz") as stored:
            return dict(stored)

    def task(self, classes: int, size: int) -> Task:
        names = [str(i) for i in range(classes)]
        return Task(kind="detection", class_names=names, image_size=size, global_batch=2)

    def plugin(self, variant: str, **options: Any) -> model.YOLOv5:
        return getattr(model, f"YOLOv5{variant}")(model.YOLOv5Options(**options))

    def network(self, variant: str, classes: int, size: int, *, dtype: str = "float64", **options: Any) -> Any:
        network = self.plugin(variant, **options).build(self.task(classes, size))
        statistics = self.spec.load_bn(variant, self.folder)
        filled = {
            name: self.spec.fill(name, ops.shape(x), statistics)
            for name, x in self.framework.state(network).items()
            if name.startswith("model.")  # not the loss's own memory, where autobalance is on: it starts as built
        }
        self.framework.load(network, {name: value for name, value in filled.items() if value is not None})
        return self.framework.to(network, dtype)

    def images(self, size: int, dtype: str = "float64") -> Any:
        return self.framework.tensor(self.spec.images(size), dtype)

    def targets(self, which: str, classes: int) -> Any:
        return self.framework.tensor(self.spec.targets(which, classes))


@pytest.fixture(scope="session")
def golden(framework: Framework) -> Golden:
    return Golden(FOLDER, _spec(), framework)
