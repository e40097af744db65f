"""What the model tests share: a bound framework and the golden numbers."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.interfaces import Task
from mtrain.models import yolov5

FOLDER = Path(__file__).parents[1] / "data" / "golden_yolov5"


@pytest.fixture(scope="session", autouse=True)
def bound_framework() -> None:
    bind(torch_nn, torch_ops)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _spec() -> ModuleType:
    location = importlib.util.spec_from_file_location("golden_yolov5_spec", FOLDER / "spec.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


@dataclass
class Golden:
    """The stored numbers, and networks filled with the weights they belong to."""

    folder: Path
    spec: ModuleType

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

    def plugin(self, variant: str, **options: Any) -> yolov5.YOLOv5:
        return getattr(yolov5, f"YOLOv5{variant}")(yolov5.YOLOv5Options(**options))

    def network(
        self, variant: str, classes: int, size: int, *, dtype: torch.dtype = torch.float64, **options: Any
    ) -> Any:
        network = self.plugin(variant, **options).build(self.task(classes, size))
        statistics = self.spec.load_bn(variant, self.folder)
        state = network.state_dict()
        for name, tensor in state.items():
            if not name.startswith("model."):  # the loss's own memory, where autobalance is on: it starts as built
                continue
            value = self.spec.fill(name, tuple(tensor.shape), statistics)
            if value is not None:
                tensor.copy_(torch.from_numpy(value))
        return network.to(dtype)

    def images(self, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.from_numpy(self.spec.images(size)).to(dtype)

    def targets(self, which: str, classes: int) -> torch.Tensor:
        return torch.from_numpy(self.spec.targets(which, classes))


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden(FOLDER, _spec())
