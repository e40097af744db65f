"""A DistributedDataParallel that adds gradients in the same order from the first update on."""

from typing import Any

import torch
from torch import nn

from mtrain.backends._torch.internals import LightDDP
from mtrain.core.overriding import override


class DeterministicBucketsDDP(LightDDP):
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
        super().__init__(*inputs, **kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("__") or not hasattr(module, name):
                raise
            raise AttributeError(
                f"{name}: with ddp, the model is your {type(module).__name__} inside a DistributedDataParallel, which has the "
                f"parameters and is called like it; its own methods and attributes are those of model.module: model.module.{name}"
            ) from None

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._settled and self.training and torch.is_grad_enabled():
            self._settled = True
            if torch.distributed.get_world_size(self.process_group) > 2:
                self._rehearse(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

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


def clear_gradients(model: nn.Module) -> None:
    """Drop the gradient of every parameter."""
    for parameter in model.parameters():
        parameter.grad = None
