"""DistributedDataParallel whose gradients add up in the same order from the first update on."""

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


class RehearsedDDP(DistributedDataParallel):
    """DDP orders its buckets anew after the first backward pass it sees.

    A ring adds the ranks' gradients in an order that depends on where they lie in a bucket. From three ranks on, the
    first update of a process would so be rounded otherwise than the same update of a process that is under way, and a
    resumed job would not be the uninterrupted one, bit for bit. One discarded pass over the first micro batch settles
    the order; two with a static graph, where the first pass only counts and the second notes the order. With two ranks
    there is one order of addition only, and nothing is done.
    """

    _settled = False

    def __init__(self, *inputs: Any, **kwargs: Any) -> None:
        # Buffers are sent before evaluations and saves, not in each forward pass; torch 2.13 renamed the argument.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        kwargs["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        with _without_compiler():
            super().__init__(*inputs, **kwargs)

    @override
    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Tells the compiler which module runs; where no compiler is loaded, asking for it would load it."""
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
        """Let go of the process group, so that destroying it ends its threads. No training afterwards.

        A gloo thread that outlives the group's destruction aborts the process when it drops its last tensor while Python
        shuts down.
        """
        for name in ("reducer", "logger", "process_group"):
            self.__dict__[name] = None

    def _rehearse(self, *inputs: Any, **kwargs: Any) -> None:
        """Forward and backward with exchange; buffers, gradients and random state are as before."""
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        device = next(self.module.parameters()).device
        exchanged = self.require_backward_grad_sync
        self.require_backward_grad_sync = True
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2 if self.static_graph else 1):
                total = super().forward(*inputs, **kwargs)["total"]
                with torch.autocast(device.type, enabled=False):
                    total.backward()
                clear_gradients(self.module)
        self.require_backward_grad_sync = exchanged
        torch.clear_autocast_cache()
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)


def _compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


@contextmanager
def _without_compiler() -> Iterator[None]:
    """DDP asks the compiler for one setting, and importing the compiler takes as long as importing torch.

    While inside, that question is answered with its default. Nothing happens where the compiler is loaded already.
    """
    if _compiler_is_loaded():
        yield
        return
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    torch.__dict__["_dynamo"] = answer
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is answer:
            del torch.__dict__["_dynamo"]


def clear_gradients(model: nn.Module) -> None:
    """No parameter holds a gradient afterwards."""
    for parameter in model.parameters():
        parameter.grad = None
