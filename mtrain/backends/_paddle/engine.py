"""The engine that every backend on Paddle shares: one rank's device, its model, its batches, and its state as numpy."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends import paddle_limits
from mtrain.backends._kernels import library
from mtrain.backends._paddle import device, internals, precision, quantising, recompute, state, syncbn
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.optimizer import PaddleOptimizer
from mtrain.backends.base import Check
from mtrain.backends.engine import Engine, LocalCollective, NoExchange, have_gradients
from mtrain.core.interfaces import Array, Batch, HostBatch, Recipe
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange
from mtrain.errors import SpecError


class PaddleEngine(Engine):
    """One rank of a job on Paddle: the session of every backend on Paddle.

    A backend with several ranks overrides ``wrap``. The recipe's ``channels_last`` changes nothing: Paddle stores the weights of a
    convolution as (out, in, h, w) for any layout of its input, and a tensor's memory layout always follows its shape.
    """

    collective: PaddleCollective
    framework_name = "Paddle"
    _device, _precision, _quantising, _state, _syncbn = device, precision, quantising, state, syncbn

    def __init__(self, collective: PaddleCollective, target: str, *, check: Check | None = None) -> None:
        """Make the engine of one rank.

        Args:
            collective: The ranks of the job.
            target: Paddle's name of this rank's device, which ``device.choose`` has made the current one.
            check: The ``Backend.check`` of the backend; None: no recipe is refused.
        """
        super().__init__(collective, target, on_cpu=target == "cpu", check=check)

    @override
    def refuse(self, recipe: Recipe) -> None:
        super().refuse(recipe)
        paddle_limits.check(recipe, on_cpu=self.on_cpu)
        precision.check(recipe.precision)
        # Paddle keeps converted weights, of which a script with an order of its own may change some in between.
        if recipe.trained and recipe.own_order and recipe.precision in precision.HALF:
            raise SpecError(
                f"session.prepare: precision {recipe.precision} given with a name or overlap=False, which Paddle does not "
                "combine; use fp32"
            )

    @override
    def optimizer(self, model: Layer, recipe: Recipe, exchange: Exchange) -> PaddleOptimizer:
        return PaddleOptimizer(model, recipe, exchange=exchange, collective=self.collective)

    @override
    def follow(self, target: Prepared, source: Prepared, share: float, copies_buffers: bool) -> None:
        own_model, other_model = state.inner(target[0]), state.inner(source[0])
        # Paddle counts the running statistics of BatchNorm among the parameters.
        statistics = {id(x) for layer in own_model.sublayers(include_self=True) for x in _statistics(layer)}
        with paddle.no_grad():
            for own, other in zip(own_model.parameters(), other_model.parameters(), strict=True):
                if id(own) not in statistics:
                    paddle.assign(other if share == 1 else paddle.lerp(own, other, share), own)
                elif copies_buffers:
                    paddle.assign(other, own)
            if copies_buffers:
                for own, other in zip(own_model.buffers(), other_model.buffers(), strict=True):
                    paddle.assign(other, own)

    @override
    def wrap_for_own_order(self, model: Layer) -> tuple[Layer, Exchange]:
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        return model, NoExchange() if self.collective.size == 1 else AfterBackward(trained, self.collective)

    @override
    def _place(self, model: Layer, recipe: Recipe) -> Layer:
        check_layer(model)
        self._freeze_as_asked(model, recipe)
        if recipe.sync_batchnorm and self.collective.size > 1:
            syncbn.synchronize(model, self.collective)
        if recipe.kernels == "auto" and self.target == "cpu" and recipe.precision != "fp64":
            self._use_kernels(model, library.load_planes())
        recompute.attach(model, recipe)
        return model.to(dtype="float64") if recipe.precision == "fp64" else model

    @override
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        return upload(loader, self.target)


def _statistics(layer: Layer) -> list[paddle.Tensor]:
    """Return the running statistics of a BatchNorm; none of another layer."""
    return [
        getattr(layer, name) for name in ("_mean", "_variance") if isinstance(getattr(layer, name, None), paddle.Tensor)
    ]


def check_layer(model: Any) -> None:
    """Refuse a user's model that is not one of Paddle.

    Raises:
        SpecError: It is not.
    """
    if not isinstance(model, Layer):
        kind = type(model)
        raise SpecError(f"the model is a {kind.__module__}.{kind.__name__}; this backend trains layers of Paddle")


def of_one_rank(target: str, *, check: Check | None = None) -> PaddleEngine:
    """Make the engine of a job with one rank; ``check``: see ``PaddleEngine``."""
    return PaddleEngine(LocalCollective(), target, check=check)


class AfterBackward(NoExchange):
    """The ``Exchange`` of a model on which nothing hangs, see that of torch."""

    def __init__(self, trained: Sequence[Tensor], collective: PaddleCollective) -> None:
        """Exchange the gradients of the parameters ``trained`` over the ranks of ``collective``."""
        self._parameters = trained
        self._collective = collective

    @override
    def finish(self) -> None:
        """Average the gradients over the ranks; every rank must call, for the same model.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent.
        """
        flags = have_gradients(self._parameters, self._collective)
        present = [parameter for parameter, flag in zip(self._parameters, flags, strict=True) if flag]
        for dtype in dict.fromkeys(parameter.dtype for parameter in present):
            message = [parameter for parameter in present if parameter.dtype == dtype]
            gradients = [p.grad if p.grad is not None else paddle.zeros_like(p) for p in message]
            flat = paddle.concat([gradient.reshape([-1]) for gradient in gradients]) / self._collective.size
            mean = self._collective.all_reduce(flat, "sum")
            for parameter, part in zip(message, mean.split([p.size for p in message]), strict=True):
                parameter.grad = part.reshape(parameter.shape)


DeviceBatch = dict[str, Tensor]


def _share_memory(array: Array) -> Tensor:
    """Return a tensor that shares the memory of ``array`` and keeps it alive; a copy unless writable and contiguous."""
    shareable = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return internals.sharing_array(shareable)


def on_host(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Yield micro batches as CPU tensors that share the memory of the loader's arrays where possible."""
    for host_batch in loader:
        yield {name: _share_memory(array) for name, array in host_batch.items()}


def on_cuda(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Yield micro batches on this rank's device; each is sent, from pinned memory, before the previous one is used."""
    pending: DeviceBatch | None = None
    for host_batch in loader:
        batch = {
            name: paddle.to_tensor(array, place=paddle.CUDAPinnedPlace()).cuda(blocking=False)
            for name, array in host_batch.items()
        }
        if pending is not None:
            yield pending
        pending = batch
    if pending is not None:
        yield pending


def upload(loader: Iterable[HostBatch], device: str) -> Iterator[DeviceBatch]:
    """Yield micro batches on ``device``."""
    return on_host(loader) if device == "cpu" else on_cuda(loader)
