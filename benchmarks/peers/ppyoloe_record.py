"""Record a training of PaddleDetection's PP-YOLOE in float64, for ``benchmarks/fed.py``: its batches, losses, rates and weights.

    python benchmarks/peers/ppyoloe_record.py CHECKOUT CONFIG.yml OUT.pkl

CONFIG is one of PaddleDetection's own, with one size of images. Its ``Trainer`` trains, and nothing of the checkout is changed:
float64 is Paddle's default type, and what goes into the network and comes out is put aside. Pixels are rounded to
whole numbers and boxes to float32 first, as both sides have them. Packages that tracking, lanes and faces need, and that are not
there, are declared empty. The averages are float32, as the original keeps them.
"""

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FOREIGN = ("imgaug", "motmetrics", "lap", "shapely", "pyclipper", "terminaltables", "sklearn.utils.linear_assignment_")
"""Packages of other tasks that PaddleDetection imports in any case."""
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


class Declared(ModuleType):
    """An empty module, of which any name may be imported."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder:
    """Finds ``Declared`` for what is missing of ``FOREIGN``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See ``importlib.abc.MetaPathFinder``; it is asked last."""
        if name.split(".")[0] in FOREIGN or name in FOREIGN:
            return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the empty module."""
        return Declared(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def main() -> None:
    """Train, and write the record."""
    checkout, config, out = (Path(word).resolve() for word in sys.argv[1:4])
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    sys.path.insert(0, str(checkout))
    import paddle

    paddle.seed(0)
    paddle.set_device("cpu")
    paddle.set_default_dtype("float64")
    from ppdet.core.workspace import load_config
    from ppdet.engine import Trainer

    trainer = Trainer(load_config(str(config)), mode="train")
    start = {
        name: value.astype("float32").astype(value.dtype) if value.dtype == paddle.float64 else value
        for name, value in trainer.model.state_dict().items()
    }
    trainer.model.set_state_dict(start)  # mtrain reads weights as float32
    record: dict[str, Any] = {"updates": [], "start": arrays(start)}
    watch(trainer, record)
    trainer.train()
    record["weights"], record["ema"] = arrays(trainer.model.state_dict()), arrays(trainer.ema.apply())
    out.write_bytes(pickle.dumps(record))


def watch(trainer: Any, record: dict[str, Any]) -> None:
    """Put aside what goes into the network and comes out, and the gradients' norm before each step."""
    import paddle

    forward, step = trainer.model.forward, trainer.optimizer.step

    def watched(data: dict[str, Any]) -> Any:
        pixels = np.rint((data["image"].numpy() * STD[:, None, None] + MEAN[:, None, None]) * 255).astype(np.uint8)
        targets, boxes = rounded(data, pixels.shape)
        images = (pixels.astype(np.float64) / 255 - MEAN[:, None, None]) / STD[:, None, None]
        data["image"], data["gt_bbox"] = paddle.to_tensor(images), paddle.to_tensor(boxes.astype(np.float64))
        data["pad_gt_mask"] = data["pad_gt_mask"].astype("float64")
        outputs = forward(data)
        update = {"pixels": pixels, "targets": targets, "loss": float(outputs["loss"])}
        record["updates"].append(update | {"rates": [float(trainer.optimizer.get_lr())], "momentum": 0.9})
        return outputs

    def stepped(*arguments: Any) -> Any:
        squares = [float((p.grad**2).sum()) for p in trainer.model.parameters() if p.grad is not None]
        record["updates"][-1]["norm"] = sum(squares) ** 0.5
        return step(*arguments)

    trainer.model.forward, trainer.optimizer.step = watched, stepped


def rounded(data: dict[str, Any], shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the objects as mtrain has them, float32 rows (T, 6) in shares of the image, and their corners (B, N, 4)."""
    height, width = shape[2:]
    sides = np.array([width, height], np.float32)
    there, corners = data["pad_gt_mask"].numpy()[..., 0] > 0, data["gt_bbox"].numpy()
    centres = ((corners[..., :2] + corners[..., 2:]) / 2 / sides).astype(np.float32)
    spans = ((corners[..., 2:] - corners[..., :2]) / sides).astype(np.float32)
    image, row = np.nonzero(there)
    labels = data["gt_class"].numpy()[image, row, 0]
    columns = (image[:, None], labels[:, None], centres[image, row], spans[image, row])
    boxes = np.concatenate(((centres - spans / 2) * sides, (centres + spans / 2) * sides), axis=2)
    return np.concatenate(columns, axis=1, dtype=np.float32), boxes * there[..., None].astype(np.float32)


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state as arrays."""
    return {name: np.array(value.numpy()) for name, value in state.items()}


if __name__ == "__main__":
    main()
