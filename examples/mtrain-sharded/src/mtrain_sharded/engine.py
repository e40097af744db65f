"""mtrain's torch engine over FSDP2: the model is split over the ranks as a whole, and its parts are trained."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from mtrain.backends.torch_engine import Exchange, ShardedOptimizer, SplitEngine, TorchOptimizer, use_channels_last
from mtrain.core.interfaces import Recipe


class ShardedEngine(SplitEngine):
    """One rank of a job. ``prepare`` returns the model that was built, with FSDP's hooks on it."""

    _channels_last = False
    _mesh: DeviceMesh | None = None

    @override
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        # FSDP takes contiguous weights only, so each convolution converts its weight when it is called.
        self._channels_last = recipe.channels_last
        return super().prepare(build, replace(recipe, channels_last=False))

    @override
    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        """Split ``model`` over ranks, in place."""
        if self._channels_last:
            use_channels_last(model)
        if self._mesh is None:
            self._mesh = init_device_mesh(self.target.type, (self.collective.size,))
        # No whole copy survives a use, so a change to the parts takes effect at the next one.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)
        return model, Averaging(model)

    @override
    def optimizer(self, model: nn.Module, recipe: Recipe, exchange: Exchange) -> TorchOptimizer:
        assert isinstance(exchange, Averaging)
        recipe = replace(recipe, channels_last=self._channels_last)
        return ShardedOptimizer(
            model, recipe, parts=exchange.parts, exchange=exchange, collective=self.collective, device=self.target
        )

    @override
    def close(self) -> None:
        """Drop the process groups, that of the mesh included: a session may outlive the job."""
        super().close()
        self._mesh = None


class Averaging:
    """The ``Exchange`` of FSDP, which averages gradients in the last backward pass and leaves each rank its part."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parts: dict[str, Tensor] = {
            name: x.to_local().detach() for name, x in model.named_parameters() if isinstance(x, DTensor)
        }
        """This rank's part of each parameter, sharing memory with FSDP."""

    def during(self, *, last: bool) -> nullcontext[None]:
        """Suppress FSDP's exchange before the last micro batch."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        return nullcontext()

    def finish(self) -> None:
        """Set the parts of averaged gradients as ``grad`` of the parts of weights."""
        for name, parameter in self._model.named_parameters():
            grad = parameter.grad
            self.parts[name].grad = grad.to_local() if isinstance(grad, DTensor) else None
            parameter.grad = None
