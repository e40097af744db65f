"""Report what the installed torch can do on this machine, for ``mtrain doctor``.

``python -m mtrain.backends._torch.probe`` prints the report as JSON. A process of its own, because it imports torch.
"""

import json
from typing import Any

import torch
from torch import distributed as dist

from mtrain.backends._torch.internals import TESTED
from mtrain.backends.base import tell_version


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad"), ``text`` and, where it helps, ``remedy``."""
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU"
    models = ", ".join(dict.fromkeys(devices))
    gpus = f"{len(devices)} x {models}" if devices else "no GPU"
    transports = [
        name for name, present in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if present
    ]
    findings = [
        {
            "state": "ok",
            "text": f"torch {torch.__version__}, {built}; {gpus}; talks over {' and '.join(transports) or 'nothing'}",
        }
    ]
    if torch.version.cuda and not devices:
        remedy = "see nvidia-smi; ranks compute on the CPU until then, a build for the CPU is smaller"
        findings.append({"state": "warning", "text": "torch is built with CUDA and sees no GPU", "remedy": remedy})
    if devices and not dist.is_nccl_available():
        findings.append(
            {"state": "bad", "text": "torch has no NCCL for its GPUs", "remedy": "install an official build"}
        )
    return findings + tell_version("torch", torch.__version__, tested=TESTED)


if __name__ == "__main__":
    print(json.dumps(look()))
