"""torch's default process group: entered by what a starter has set, and left."""

from datetime import timedelta

from torch import distributed as dist

from mtrain.core.errors import LaunchError


def join(backend: str, *, on_cuda: bool, timeout: timedelta) -> None:
    """Enter it: NCCL on CUDA, gloo on CPU. Every rank calls.

    Raises:
        LaunchError: no starter has set its variables; ``backend`` is who asks.
    """
    try:
        dist.init_process_group("nccl" if on_cuda else "gloo", init_method="env://", timeout=timeout)
    except ValueError as error:
        raise LaunchError(
            f"backend {backend} was not started by torchrun: {error}; use `mtrain -c SPEC --backend {backend}`, or "
            "`torchrun -m mtrain.worker`"
        ) from error


def leave(*, failed: bool) -> None:
    """Leave it, if this process is in it; ``failed``: because of an error."""
    if not dist.is_initialized():
        return
    if failed and dist.get_backend() == "nccl":
        # Peers may never answer: give kernels in flight up instead of waiting for them.
        dist.distributed_c10d._abort_process_group()
        return
    dist.destroy_process_group()
