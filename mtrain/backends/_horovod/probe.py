"""Report what the installed Horovod can do on this machine, for ``mtrain doctor``.

``python -m mtrain.backends._horovod.probe`` prints the report as JSON. A process of its own, because it imports
Horovod.
"""

import json
from typing import Any

import horovod
import torch

from mtrain.backends._horovod import library
from mtrain.errors import PluginError


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad"), ``text`` and, where it helps, ``remedy``."""
    try:
        hvd = library.load()
    except PluginError as error:
        return [{"state": "bad", "text": error.problem, "remedy": error.remedy}]
    built = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": hvd.cuda_built(),
        "ROCm": hvd.rocm_built(),
    }
    with_it = ", ".join(name for name, present in built.items() if present)
    without = ", ".join(name for name, present in built.items() if not present)
    text = f"horovod {horovod.__version__} for torch {torch.__version__}, built with {with_it}; without {without}"
    findings = [{"state": "ok", "text": text}]
    if torch.cuda.is_available() and not built["NCCL"]:
        text = "this machine has GPUs, but horovod was built without NCCL: gradients are exchanged through host memory"
        findings.append(
            {
                "state": "warning",
                "text": text,
                "remedy": f"build it with HOROVOD_GPU_OPERATIONS=NCCL; {library.remedy()}",
            }
        )
    return findings


if __name__ == "__main__":
    print(json.dumps(look()))
