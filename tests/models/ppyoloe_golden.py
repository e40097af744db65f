"""The golden numbers of PP-YOLOE, and networks filled with the weights they belong to; for either framework."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.models.ppyoloe import model
from tests.framework import Framework

FOLDER = Path(__file__).parents[1] / "data" / "golden_ppyoloe"
PARTS = ("total", "cls", "iou", "dfl", "l1")
"""In the order of the stored losses."""
Array = np.ndarray[Any, np.dtype[Any]]


def _rules() -> ModuleType:
    location = importlib.util.spec_from_file_location("golden_ppyoloe_rules", FOLDER / "rules.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


RULES = _rules()


@cache
def stored(name: str) -> dict[str, Array]:
    """Arrays of one file, by its path without suffix."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def facts(size: str, classes: int) -> dict[str, Any]:
    """Counts and entries of a published state; entries by name."""
    folder = FOLDER / "state_dicts"
    full = json.loads((folder / f"ppyoloe_crn_{size}_nc80.json").read_text())
    entries = {name: (tuple(shape), kind, trained) for name, shape, kind, trained in full["entries"]}
    if classes == 80:
        return full | {"entries": entries}
    other = json.loads((folder / f"ppyoloe_crn_{size}_nc{classes}.json").read_text())
    changed = {
        name: (tuple(shape), kind, trained) for name, shape, kind, trained in other["entries_that_differ_from_nc80"]
    }
    return other | {"entries": entries | changed}


def published(name: str) -> str:
    """A neutral state name as the published one."""
    return name.replace(".running_mean", "._mean").replace(".running_var", "._variance")


def is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def task(classes: int, image_size: int = 64) -> Task:
    names = [str(i) for i in range(classes)]
    return Task(kind="detection", class_names=names, image_size=image_size, global_batch=2)


def plugin(size: str, *, plus: bool = False, **options: Any) -> model.PPYOLOE:
    return getattr(model, f"PPYOLOE{'Plus' if plus else ''}{size}")(model.PPYOLOEOptions(**options))


def summary_row(name: str, array: Array) -> Array:
    """``[sqrt(sum a^2), sum(a * probe), mean(a)]`` of an array with a published name."""
    a = np.asarray(array, np.float64)
    return np.array([np.sqrt(np.square(a).sum()), (a * RULES.probe(name, a.shape)).sum(), a.mean()])


def stats_vector(array: Array, k: int) -> Array:
    """``[mean, biased deviation, max |a|, sqrt(sum a^2), first k values]``."""
    a = np.asarray(array, np.float64)
    first = np.zeros(k)
    first[: min(k, a.size)] = a.ravel()[:k]
    return np.concatenate(([a.mean(), a.std(), np.abs(a).max(), np.sqrt(np.square(a).sum())], first))


def assert_close(result: Any, expected: Any, rtol: float, message: str = "") -> None:
    """Within ``rtol`` of the largest expected value."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert result.shape == expected.shape, f"{message}: {result.shape}, not {expected.shape}"
    if expected.size:
        off, scale = float(np.abs(result - expected).max()), float(np.abs(expected).max())
        assert off <= rtol * scale, f"{message}: {off:.2e} off where {scale:.2e} is the largest"


def assert_rows_close(names: Any, result: Array, expected: Array, rtol: float, *, floor: float = 1e-30) -> None:
    """Summary rows: each metric within ``rtol`` of the norm of its array, or of ``floor`` where that is larger."""
    off = np.abs(result - expected).max(axis=1) / np.maximum(expected[:, 0], floor)
    worst = int(off.argmax())
    assert off[worst] <= rtol, f"{names[worst]}: {off[worst]:.2e} of its norm {expected[worst, 0]:.2e}"


@dataclass
class Job:
    """A filled network of one framework, and what the stored runs did with it."""

    framework: Framework
    network: Any
    dtype: str

    @classmethod
    def filled(
        cls,
        framework: Framework,
        size: str,
        classes: int,
        *,
        dtype: str = "float64",
        collective: Any = None,
        plus: bool = False,
    ) -> "Job":
        network = plugin(size, plus=plus).build(task(classes), collective or OneRank())
        network = framework.to(network, dtype)
        shapes = {name: tuple(x.shape) for name, x in framework.state(network).items() if not is_counter(name)}
        framework.load(network, {name: RULES.fill(published(name), shape, size) for name, shape in shapes.items()})
        return cls(framework, network, dtype)

    def image(self, height: int, width: int, key: str | None = None) -> Any:
        return self.framework.tensor(RULES.image(height, width, key=key), self.dtype)

    def truth(self, height: int, width: int, classes: int, case: str) -> Any:
        return truth(self.framework, *RULES.targets(height, width, classes, case)[:2])

    def mode(self, *, training: bool) -> None:
        self.network.train() if training else self.network.eval()

    def state(self) -> dict[str, Array]:
        """Arrays by published name, counters left out; in the network's order."""
        live = self.framework.state(self.network)
        return {
            published(name): np.array(self.framework.ops.to_numpy(x))
            for name, x in live.items()
            if not is_counter(name)
        }

    def losses(self, image: Any, targets: Any, *, static: bool) -> dict[str, Any]:
        outputs, points = self.network.outputs(image)
        return self.network.loss(outputs, points, targets, static=static)

    def numbers(self, losses: Mapping[str, Any]) -> Array:
        return np.array([float(self.framework.ops.to_numpy(losses[part])) for part in PARTS])

    def gradients(self, total: Any) -> dict[str, Array]:
        live = self.framework.parameters(self.network)
        return dict(zip(live, self.framework.gradients(total, list(live.values())), strict=True))


def truth(framework: Framework, classes_BN1: Array, boxes_BN4: Array, dtype: str = "float32") -> Any:
    """Labels and boxes of the stored runs, without the mask: padded boxes are zeros."""
    from mtrain.models.ppyoloe.assign import Truth

    labels = framework.tensor(classes_BN1[:, :, 0], "int64")
    return Truth(labels_BN=labels, boxes_BN4=framework.tensor(boxes_BN4, dtype))
