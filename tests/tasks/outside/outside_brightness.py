"""Regression as an outsider's task: the mean brightness of an image, from 0 to 1, learnt by one linear layer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset, Model, Remark, SplitRequest, Table, Task
from mtrain.data.images.decode import decode
from mtrain.data.images.drawing import grid, save_image
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.spec.model import DataSpec
from mtrain.spec.section import Section
from mtrain.tasks.base import NoOptions, TaskBase


class SquareDataSpec(DataSpec):
    """What the task adds to `data`."""

    darken: float = Field(default=0.0, ge=0, lt=1, description="share by which training images become darker")


class GaugeSpec(Section):
    """The scale of the reported brightness."""

    white: float = Field(default=1.0, gt=0, description="brightness of a white image")
    unit: str = Field(default="", description="unit, for display")


class SquareOptions(BaseModel):
    """Options of the data set."""

    model_config = ConfigDict(extra="forbid")
    images: int = 64


@dataclass
class Squares:
    """Images (N, S, S, 3) uint8 and their brightness (N,)."""

    images: Any
    brightness: Any
    class_names: tuple[str, ...] = ("brightness",)

    def __len__(self) -> int:
        return len(self.images)


class GreySquares(Dataset):
    """A data set that is drawn from a seed."""

    kind = "brightness"
    Options = SquareOptions

    def __init__(self, options: SquareOptions) -> None:
        self.options = options

    def read(self, request: SplitRequest) -> Squares:
        rng = np.random.default_rng(1 if request.split == "train" else 2)
        pixels = rng.integers(0, 256, (self.options.images, 1, 1, 1), dtype=np.uint8) * np.ones((1, 8, 8, 3), np.uint8)
        return Squares(pixels, pixels.mean((1, 2, 3)) / 255)


class Source:
    """One split as samples."""

    def __init__(self, split: Squares, *, darken: float = 0.0) -> None:
        self.split = split
        self.keep = 1 - darken
        self.array = ArraySpec("images", (8, 8, 3))

    def __len__(self) -> int:
        return len(self.split)

    def describe(self, index: int) -> str:
        return f"square {index}"

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        return self.array.shape

    def fill(self, epoch: int, index: int, out: Any, *, update: int = 0) -> tuple[int, float]:
        out[...] = self.split.images[index] * self.keep
        return index, float(self.split.brightness[index] * self.keep)

    def collate(self, samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
        indices, brightness = zip(*samples, strict=True)
        return {"brightness": np.array(brightness, np.float32), "index": np.array(indices, np.int64)}


class Evaluator:
    """Mean absolute error; the score is one minus it."""

    metrics = ("error", "score")
    headline = ("error",)

    def __init__(self, split: Squares) -> None:
        self.split = split
        self.predictions: dict[int, float] = {}

    def add(self, batch: Mapping[str, Any], predictions: Sequence[Any]) -> None:
        for index, value in zip(batch["index"], predictions, strict=True):
            self.predictions.setdefault(int(index), float(value))

    def partial(self) -> dict[int, float]:
        return self.predictions

    def result(self, partials: Sequence[Mapping[int, float]]) -> dict[str, float]:
        union = {index: value for partial in partials for index, value in partial.items()}
        error = float(np.mean([abs(value - self.split.brightness[index]) for index, value in union.items()]))
        return {"error": error, "score": 1 - error}

    def remarks(self) -> list[str]:
        return []


class BrightnessTask(TaskBase):
    """The task: see ``TaskKind`` and ``TaskData`` of ``mtrain.core.interfaces``."""

    sections: ClassVar[Mapping[str, type[Section]]] = {"data": SquareDataSpec, "gauge": GaugeSpec}

    def __init__(self, spec: Any, data: Any, *, training: bool = True) -> None:
        self.spec, self.data, self.training = spec, data, training

    @classmethod
    def images(cls, spec: Any, files: Sequence[Path], labels: Mapping[str, Any]) -> "Unlabelled":
        images = np.stack([decode(file) for file in files])
        return Unlabelled(spec, Squares(images, np.zeros(len(files))), files)

    def task(self) -> Task:
        return Task(
            kind="brightness", class_names=("brightness",), image_size=8, global_batch=self.spec.train.batch_size
        )

    def sources(self) -> dict[str, Source]:
        names = ("train", "val") if self.training else ("val",)
        darken = {"train": self.spec.data.darken, "val": 0.0}
        return {name: Source(getattr(self.data, name), darken=darken[name]) for name in names}

    def length(self, split: str) -> int:
        return len(getattr(self.data, split))

    def statistics(self) -> dict[str, Any]:
        return {}

    def evaluator(self) -> Evaluator:
        return Evaluator(self.data.val)

    def verify(self) -> str:
        return f"{len(self.data.train)} squares"

    def labels(self) -> dict[str, Any]:
        return {"class_names": ["brightness"]}

    def report(self) -> list[str]:
        return []

    def describe(self) -> list[Table | Remark]:
        return [Remark(text=f"{len(self.data.train)} squares")]

    def views(self, *, limit: int) -> Any:
        yield "train", "squares", grid(list(self.data.train.images[:limit]), columns=4, cell_px=32)

    def draw(self, partial: Mapping[int, float], path: Path) -> None:
        save_image(grid(list(self.data.val.images[:4]), columns=2, cell_px=32), path)


class Unlabelled(BrightnessTask):
    """Images to predict on."""

    def __init__(self, spec: Any, split: Squares, files: Sequence[Path]) -> None:
        class Data:
            val = split

        super().__init__(spec, Data(), training=False)
        self.files = files

    def write(
        self, partial: Mapping[int, float], out: Path, *, confidence: float, draw: bool, names: Any = None
    ) -> None:
        entries = [
            {
                "file_name": (names or {}).get(file, str(file)),
                "class": "brightness",
                "score": 1.0,
                "value": partial[index] * self.spec.gauge.white,
            }
            for index, file in enumerate(self.files)
        ]
        (out / "predictions.json").write_text(json.dumps(entries))


class Linear(Model):
    """One linear layer over the mean colour: see ``Model`` of ``mtrain.core.interfaces``."""

    Options = NoOptions
    kind = "brightness"

    def __init__(self, options: NoOptions | None = None) -> None:
        self.options = options

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        return task

    def build(self, task: Task, collective: Any = None) -> Any:
        from mtrain.core import nn, ops

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
                means_B3 = ops.mean(ops.astype(batch["images"], "float32") / 255.0, axis=(1, 2))
                values_B = ops.reshape(self.layer(means_B3), (-1,))
                if not self.training:
                    return {"values": values_B}
                return {"total": ops.mean((values_B - batch["brightness"]) ** 2)}

        return Network()

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Any]:
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def predictions(self, output: Mapping[str, Any], batch: Mapping[str, Any]) -> list[Any]:
        return list(np.asarray(output["values"]))
