"""What the installed Horovod can do here, for ``mtrain doctor``: ``python -m mtrain.backends._horovod.probe`` prints JSON."""

import json
from typing import Any

import horovod
import torch

from mtrain.backends._horovod import library
from mtrain.errors import PluginError


def look() -> list[dict[str, Any]]:
    """One entry per thing to tell: ``state`` ("ok", "warning", "bad"), ``text``, ``remedy``."""
    try:
        hvd = library.load()
    except PluginError as error:
        text, _, remedy = str(error).partition("; ")
        return [{"state": "bad", "text": text, "remedy": remedy}]
    built = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": hvd.cuda_built(),
        "ROCm": hvd.rocm_built(),
    }
    with_it = ", ".join(name for name, there in built.items() if there)
    without = ", ".join(name for name, there in built.items() if not there)
    text = f"horovod {horovod.__version__} for torch {torch.__version__}, built with {with_it}; without {without}"
    found = [{"state": "ok", "text": text}]
    if torch.cuda.is_available() and not built["NCCL"]:
        text = "GPUs are here, and horovod was built without NCCL: gradients go through the host"
        found.append(
            {
                "state": "warning",
                "text": text,
                "remedy": f"build it with HOROVOD_GPU_OPERATIONS=NCCL; {library.remedy()}",
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
