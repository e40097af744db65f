"""Whether mtrain's PP-YOLOE starts from the distribution of weights of PaddleDetection's: no training, only start weights.

    PYTHON benchmarks/starts.py CHECKOUT FOLDER

FOLDER is a data set in COCO form, whose number of classes counts. Arrays that one side starts with one value must be the same on
the other. Of each other array the standard deviations are compared, in standard errors of their difference, and the means likewise.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "peers")]


def main() -> None:
    """Draw both starts, and print what differs most."""
    checkout, data = (Path(word).resolve() for word in sys.argv[1:3])
    theirs = original(checkout, data)
    ours = drawn({name: array.shape for name, array in theirs.items()})
    constant, scores = 0, []
    for name, array in theirs.items():
        own = ours[name]
        if np.ptp(array) == 0 or np.ptp(own) == 0 or not np.issubdtype(own.dtype, np.floating):
            if not np.allclose(array.ravel(), own.ravel(), atol=1e-6):
                print(f"{name}: {array.ravel()[:3]} in the original, {own.ravel()[:3]} in mtrain")
            constant += 1
            continue
        spread = (own.std() / array.std() - 1) * np.sqrt(array.size)  # each has a standard error of 1 / sqrt(2 size)
        place = (own.mean() - array.mean()) / np.sqrt((own.var() + array.var()) / array.size)
        scores.append((abs(float(spread)), abs(float(place)), name))
    found = np.array([row[:2] for row in scores])
    print(f"{constant} arrays with one value each; {len(scores)} drawn arrays, differences in standard errors:")
    print(
        f"deviation: root mean square {np.sqrt((found[:, 0] ** 2).mean()):.2f}, largest {max(scores)[0]:.2f} ({max(scores)[2]})"
    )
    print(f"mean: root mean square {np.sqrt((found[:, 1] ** 2).mean()):.2f}, largest {found[:, 1].max():.2f}")


def original(checkout: Path, data: Path) -> dict[str, Any]:
    """Return the start weights of PaddleDetection under mtrain's names."""
    from ppyoloe_record import Finder
    from ppyoloe_train import CONFIG

    from benchmarks.fed import neutral

    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    sys.path.insert(0, str(checkout))
    import paddle
    from ppdet.core.workspace import create, load_config

    classes = len(json.loads((data / "annotations" / "instances_train.json").read_text())["categories"])
    values = {"rate": 0.01, "epochs": 1, "horizon": 1, "static": 1, "batch": 8, "classes": classes, "side": 128}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yml")
        config.write_text(CONFIG.format(**values, checkout=checkout, data=data, folder=folder))
        loaded = load_config(str(config))
    paddle.seed(0)
    state = create(loaded.architecture).state_dict()
    return {neutral(name): np.array(value.numpy()) for name, value in state.items()}


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return mtrain's start values of arrays with these names and shapes."""
    from mtrain.models.ppyoloe.model import PPYOLOEs

    task: Any = None  # the start depends on names and shapes alone
    return PPYOLOEs().initial(shapes, task, seed=0)


if __name__ == "__main__":
    main()
