"""Run one rank of the Horovod tests: ``horovod_ranks STUDIES BACKEND OUT OPTIONS`` (see ``rank_main``), started by the
backend's own starter."""

import os
import sys
from typing import Any

import numpy as np
import torch

from mtrain.backends.horovod import Horovod
from tests.backends.rank_main import main


def collectives(session: Any) -> Any:
    """Every kind of call, with every kind of value."""
    c = session.collective
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


def environment(session: Any) -> Any:
    """Horovod's settings are in its hands, not in the environment of what a rank starts."""
    names = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return {"left": [name for name in names if name in os.environ], "compiler": "torch._dynamo" in sys.modules}


if __name__ == "__main__":
    main(Horovod, globals(), sys.argv[1:])
