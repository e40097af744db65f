"""Join torch's default process group, as described by the launcher's environment variables, and leave it."""

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from mtrain.backends._torch import internals
from mtrain.backends._torch.collective import DistributedCollective
from mtrain.backends._torch.ranks.store import listening_store
from mtrain.errors import LaunchError


def join(backend: str, *, on_cuda: bool, timeout: timedelta) -> None:
    """Join the default process group: NCCL on CUDA, gloo on the CPU. Every rank must call.

    Args:
        backend: Name of the backend that joins, for the error message.
        on_cuda: Whether this rank computes on CUDA.
        timeout: A collective that waits longer fails.

    Raises:
        LaunchError: The launcher's environment variables are missing or wrong.
    """
    internals.release_groups()
    internals.import_before_joining()
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


def connect(backend: str, target: torch.device, *, timeout: timedelta) -> DistributedCollective:
    """Join the default process group as ``join`` does, and return the collective over it; ``target``: this rank's device."""
    on_cuda = target.type == "cuda"
    join(backend, on_cuda=on_cuda, timeout=timeout)
    # Numpy arrays and objects travel over gloo, so that they never wait for a device.
    return DistributedCollective(host_group=dist.new_group(backend="gloo", timeout=timeout) if on_cuda else None)


def _own_store(timeout: timedelta) -> dist.distributed_c10d.Store | None:
    """Return a store that this rank must host itself, because it is rank 0 and its launcher hosts none.

    None leaves the store to torch, which connects to an existing one or reports the variable that is missing. A store
    that torch hosts would listen on every interface, this one listens at the rendezvous address alone.
    """
    environ = os.environ
    has_rendezvous = all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not has_rendezvous or environ["RANK"] != "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = listening_store(address, port, size=int(environ["WORLD_SIZE"]), timeout=timeout)
    return None if store is None else internals.store_of_default_group(store)


def leave(*, failed: bool) -> None:
    """Leave the default process group if this process is in it; ``failed``: it leaves because of an error."""
    if not dist.is_initialized():
        return
    if failed and dist.get_backend() == "nccl":
        # Peers may never answer: abandon the kernels in flight instead of waiting for them.
        internals.abort_default_group()
        return
    internals.destroy_groups()
