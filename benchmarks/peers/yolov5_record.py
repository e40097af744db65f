"""Record a training of YOLOv5 in float64, for ``benchmarks/fed.py``: its batches, losses, rates and weights.

    python benchmarks/peers/yolov5_record.py CHECKOUT NOMINAL_BATCH OUT.pt [arguments of train.py]

The original is started as by ``yolov5_train.py``. Further edits make its network float64 and put aside what it computes;
pixels and labels are rounded to float32 first, as both sides have them.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from yolov5_train import NOMINAL, started

EDITS = {
    "model.half().float()  # pre-reduce anchor precision": "model.half().double(); ema.ema.double()",
    ".float() / 255  #": "; imgs = imgs.double() / 255; targets = targets.float().double()  #",
    "            imgs = imgs.to(device, non_blocking=True)": "            PIXELS = imgs.numpy().copy()\n"
    "            imgs = imgs.to(device, non_blocking=True)",
    "    model.names = names\n": "    model.names = names\n    RECORD['start'] = COPIED(model)\n",
    "                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)": (
        "                NORM = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0))"
    ),
    "                mloss = (mloss * i + loss_items) / (i + 1)": "                RECORD['updates'].append("
    "dict(loss=float(loss), norm=NORM, momentum=float(optimizer.param_groups[0]['momentum']), "
    "rates=[float(x['lr']) for x in optimizer.param_groups], pixels=PIXELS, targets=targets.float().numpy()))\n"
    "                mloss = (mloss * i + loss_items) / (i + 1)",
    "        # Scheduler\n        lr = [": "        RECORD['weights'], RECORD['ema'] = COPIED(model), COPIED(ema.ema)\n"
    "        # Scheduler\n        lr = [",
}


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a module's state."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def main() -> None:
    """Train, and write the record."""
    checkout, nominal, out = Path(sys.argv[1]).resolve(), int(sys.argv[2]), Path(sys.argv[3]).resolve()
    torch.set_default_dtype(torch.float64)
    record: dict[str, Any] = {"updates": []}
    edits = {NOMINAL: f"    nbs = {nominal}\n", **EDITS}
    try:
        started(checkout, edits, sys.argv[4:], {"RECORD": record, "COPIED": copied, "PIXELS": None, "NORM": 0.0})
    except RuntimeError as error:  # it reads its own file of half precision after the training, and fuses layers
        if "ema" not in record:
            raise
        print(f"after the training: {error}", file=sys.stderr)
    torch.save(record, out)


if __name__ == "__main__":
    main()
