"""A DistributedDataParallel that adds gradients in the same order from the first update on."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class DeterministicBucketsDDP(DistributedDataParallel):
    """A DDP whose buckets have their final order before the first update.

    DDP reorders its buckets after the first backward pass it sees, and a ring adds the ranks' gradients in an order
    that depends on where they lie in a bucket. With three or more ranks the first update of a process would therefore
    be rounded differently from the same update of a process that has been running, and a resumed job would not match
    the uninterrupted one bit for bit. One discarded pass over the first micro batch settles the order; with a static
    graph it takes two, because the first pass only counts and the second records the order. Two ranks have a single
    order of addition, so nothing is done.

    With ``rehearse=False`` there is no such pass, because the module may return anything. The caller must then set
    ``find_unused_parameters``, under which DDP keeps its buckets in the order of the parameters from the start.
    """

    def __init__(self, *inputs: Any, rehearse: bool = True, **kwargs: Any) -> None:
        self._settled = not rehearse
        # mtrain broadcasts buffers before evaluations and saves, so DDP must not do it in each forward pass. torch 2.13
        # renamed the argument.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        kwargs["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        with _without_compiler():
            super().__init__(*inputs, **kwargs)

    @override
    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Tell the compiler which module runs, but only if it is loaded: the base class would import it."""
        with super()._inside_ddp_forward() if _compiler_is_loaded() else nullcontext():
            yield

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._settled and self.training and torch.is_grad_enabled():
            self._settled = True
            if torch.distributed.get_world_size(self.process_group) > 2:
                self._rehearse(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def release(self) -> None:
        """Drop the process group, so that destroying it ends its threads. The module cannot train afterwards.

        A gloo thread that outlives the destruction of the group aborts the process if it frees its last tensor while
        Python shuts down.
        """
        for name in ("reducer", "logger", "process_group"):
            self.__dict__[name] = None

    def _rehearse(self, *inputs: Any, **kwargs: Any) -> None:
        """Run forward and backward with an exchange, then restore buffers, gradients and random state."""
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        device = next(self.module.parameters()).device
        sync_before = self.require_backward_grad_sync
        self.require_backward_grad_sync = True
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2 if self.static_graph else 1):
                total = super().forward(*inputs, **kwargs)["total"]
                with torch.autocast(device.type, enabled=False):
                    total.backward()
                clear_gradients(self.module)
        self.require_backward_grad_sync = sync_before
        torch.clear_autocast_cache()
        with torch.no_grad():
            for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(saved)


def _compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep DDP's constructor from importing torch's compiler, which takes as long as importing torch itself.

    The constructor reads one setting of ``torch._dynamo``. Inside this context a stand-in answers with the setting's
    default. Nothing is replaced where the compiler is loaded already.
    """
    if _compiler_is_loaded():
        yield
        return
    stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]


def clear_gradients(model: nn.Module) -> None:
    """Drop the gradient of every parameter."""
    for parameter in model.parameters():
        parameter.grad = None
