"""What one rank of the Horovod tests runs: ``horovod_ranks STUDIES BACKEND OUT OPTIONS``, started by the backend's own starter.

STUDIES names functions of this file and of ``studies``, with commas between; each gets the backend, and what it returns on
every rank comes to OUT/<study>.json as a list ordered by rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain.backends.ddp import DDP
from mtrain.backends.horovod import Horovod
from tests.backends import studies as shared


def collectives(backend: Any) -> Any:
    """Every kind of call, with every kind of value."""
    c = backend.collective
    mine = c.rank + 1
    source = torch.tensor([[mine, -mine]], dtype=torch.float64, requires_grad=True)
    strided = torch.arange(6.0).reshape(2, 3).t() * mine
    buffers = [torch.full((2, 2), float(mine)), torch.tensor(mine), torch.full((3,), float(mine)).double()]
    c.broadcast_(buffers)
    everyone = c.all_gather({"rank": c.rank, "long": "x" * 1000 * c.rank})
    return {
        "sum": c.all_reduce(source, "sum").tolist(),
        "gradient": c.all_reduce(source, "sum").requires_grad,
        "untouched": source.tolist(),
        "max": c.all_reduce(np.array([mine, -mine]), "max").tolist(),
        "mean": c.all_reduce(np.float32([mine]), "mean").tolist(),
        "scalar": float(c.all_reduce(np.array(float(mine)), "sum")),
        "int": c.all_reduce(torch.tensor([mine]), "sum").tolist(),
        "strided": c.all_reduce(strided, "sum").tolist(),
        "type": str(c.all_reduce(np.ones(2), "sum").dtype),
        "gathered": [(value["rank"], len(value["long"])) for value in everyone],
        "stacked": c.all_gather_tensor(source[0]).tolist(),
        "broadcast": [buffer.tolist() for buffer in buffers],
    }


def environment(backend: Any) -> Any:
    """Horovod's settings are in its hands, not in the environment of what a rank starts."""
    names = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return {"left": [name for name in names if name in os.environ], "compiler": "torch._dynamo" in sys.modules}


def main(studies: str, name: str, out: Path, **options: Any) -> None:
    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"ddp": DDP, "horovod": Horovod}
    extra = {"find_unused_parameters": True, "static_graph": False} if name == "ddp" else {}
    with kinds[name](kinds[name].Options(device="cpu", **extra, **options)) as backend:
        for study in studies.split(","):
            run = globals().get(study) or getattr(shared, study)
            everyone = backend.collective.all_gather(run(backend))
            if backend.collective.rank == 0:
                (out / f"{study}.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), **json.loads(sys.argv[4]))
