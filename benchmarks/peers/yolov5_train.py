"""Start ``train.py`` of a checkout of YOLOv5 with its own recipe, for ``benchmarks/accuracy.py``.

    python benchmarks/peers/yolov5_train.py CHECKOUT NOMINAL_BATCH [arguments of train.py]

Nothing of the original is part of mtrain, and its code is not changed but for what is no part of a training. ``nbs``, the
batch from which it computes how many batches make an update, is NOMINAL_BATCH. It does not validate, because one judge
scores both sides, and fetches no font, as nothing is drawn. It finds no albumentations, which it would apply to a few
images in a hundred if the package happened to be there. Where torchvision has no operator for this torch, the name is
declared so that torchvision can be imported.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

NOMINAL = "    nbs = 64  # nominal batch size\n"


def main() -> None:
    """Run the original's ``train.py`` in this process, as ``python train.py`` would."""
    checkout, nominal = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    started(checkout, {NOMINAL: f"    nbs = {nominal}\n"}, sys.argv[3:], {})


def started(checkout: Path, edits: Mapping[str, str], arguments: Sequence[str], names: Mapping[str, Any]) -> None:
    """Run ``train.py`` of ``checkout`` with ``edits`` of its text, and with ``names`` for what the edits use.

    Ends the program if a text that is edited does not occur exactly once.
    """
    # None makes the import fail, as where the package is not installed.
    sys.modules["albumentations"] = None  # type: ignore[assignment]
    library = named_operator()  # kept for the life of the process
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    import val
    from utils import general

    val.run, general.check_font = unvalidated, lambda *_, **__: None
    source = (checkout / "train.py").read_text()
    for old, new in edits.items():
        if source.count(old) != 1:
            raise SystemExit(f"{checkout}/train.py: expected {old.strip()!r} once; this checkout has another recipe")
        source = source.replace(old, new)
    sys.argv = ["train.py", *arguments]
    exec(
        compile(source, str(checkout / "train.py"), "exec"),
        {"__name__": "__main__", "__file__": str(checkout / "train.py"), **names},
    )
    del library


def named_operator() -> torch.library.Library | None:
    """Declare ``torchvision::nms`` and ``qnms`` where torchvision's binary does not fit this torch; training does not call it."""
    try:
        import torchvision  # noqa: F401 - imported for its operators
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def unvalidated(data: dict[str, Any], *_: Any, **__: Any) -> tuple[tuple[float, ...], Any, tuple[float, ...]]:
    """Take the place of ``val.run``."""
    import numpy as np

    return (0.0,) * 7, np.zeros(int(data["nc"])), (0.0,) * 3


if __name__ == "__main__":
    main()
