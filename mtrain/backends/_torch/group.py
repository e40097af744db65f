"""torch's default process group: entered by what a starter has set, and left."""

import os
from datetime import timedelta

from torch import distributed as dist

from mtrain.backends._torch.store import listening_store
from mtrain.errors import LaunchError


def join(backend: str, *, on_cuda: bool, timeout: timedelta) -> None:
    """Enter it: NCCL on CUDA, gloo on CPU. Every rank calls.

    Raises:
        LaunchError: no starter has set its variables; ``backend`` is who asks.
    """
    library = "nccl" if on_cuda else "gloo"
    try:
        store = _own_store(timeout)
        if store is None:
            dist.init_process_group(library, init_method="env://", timeout=timeout)
        else:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(library, store=store, rank=rank, world_size=size, timeout=timeout)
    except ValueError as error:
        raise LaunchError(
            f"backend {backend} was not started by torchrun: {error}; use `mtrain -c SPEC --backend {backend}`, or "
            "`torchrun -m mtrain.rank.worker`"
        ) from error


def _own_store(timeout: timedelta) -> dist.distributed_c10d.Store | None:
    """The store of a rank 0 whose starter has made none; None: torch finds one, or says what is missing.

    torch itself would listen on every interface. The prefix is that of torch, which the other ranks use.
    """
    environ = os.environ
    given = all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not given or environ["RANK"] != "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = listening_store(address, port, size=int(environ["WORLD_SIZE"]), timeout=timeout)
    return None if store is None else dist.distributed_c10d.PrefixStore("default_pg", store)


def leave(*, failed: bool) -> None:
    """Leave it, if this process is in it; ``failed``: because of an error."""
    if not dist.is_initialized():
        return
    if failed and dist.get_backend() == "nccl":
        # Peers may never answer: give kernels in flight up instead of waiting for them.
        dist.distributed_c10d._abort_process_group()
        return
    dist.destroy_process_group()
