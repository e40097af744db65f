"""What the installed torch can do here, for ``mtrain doctor``: ``python -m mtrain.backends._torch.probe`` prints JSON."""

import json
from typing import Any

import torch
from torch import distributed as dist


def look() -> list[dict[str, Any]]:
    """One entry per thing to tell: ``state`` ("ok", "warning", "bad"), ``text``, ``remedy``."""
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU"
    there = ", ".join(dict.fromkeys(devices))
    seen = f"{len(devices)} x {there}" if devices else "no GPU"
    ways = [name for name, there in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if there]
    found = [
        {
            "state": "ok",
            "text": f"torch {torch.__version__}, {built}; {seen}; talks over {' and '.join(ways) or 'nothing'}",
        }
    ]
    if torch.version.cuda and not devices:
        remedy = "see nvidia-smi; ranks compute on the CPU until then, a build for the CPU is smaller"
        found.append({"state": "warning", "text": "torch is built with CUDA and sees no GPU", "remedy": remedy})
    if devices and not dist.is_nccl_available():
        found.append({"state": "bad", "text": "torch has no NCCL for its GPUs", "remedy": "install an official build"})
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
