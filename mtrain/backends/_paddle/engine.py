"""The engine that every backend on Paddle shares: one rank's device, its model, its batches, and its state as numpy."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import paddle
from paddle.nn import Layer

from mtrain.backends import paddle_limits
from mtrain.backends._paddle import batches, device, precision, state, syncbn
from mtrain.backends._paddle.collective import LocalCollective, PaddleCollective
from mtrain.backends._paddle.optimizer import Exchange, PaddleOptimizer
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Array, Batch, HostBatch, Recipe, State
from mtrain.core.recipe import is_frozen
from mtrain.errors import SpecError

Wrap = Callable[[Layer, Recipe], tuple[Layer, Exchange]]
"""Maps a model to (the layer that is called in training, how its gradients are exchanged)."""


class NoExchange:
    """The exchange of a job with one rank, whose gradient already is the mean."""

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing around a micro batch."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: there is nothing to exchange."""


def alone(model: Layer, recipe: Recipe) -> tuple[Layer, Exchange]:
    """Return the model unchanged: the ``Wrap`` of a job with one rank."""
    return model, NoExchange()


class PaddleEngine:
    """One rank of a job on Paddle. A backend holds one engine and forwards its calls to it."""

    def __init__(self, collective: PaddleCollective, target: str) -> None:
        """Make the engine for device ``target``, which ``device.choose`` has made the current one."""
        self.collective = collective
        self.device = target
        self.waits: Waits | None = None
        self._recipe: Recipe | None = None

    def prepare(self, build: Callable[[], Layer], recipe: Recipe, wrap: Wrap = alone) -> tuple[Layer, PaddleOptimizer]:
        """See ``Backend.prepare``.

        The recipe's ``channels_last`` changes nothing: Paddle stores the weights of a convolution as (out, in, h, w)
        for any layout of its input, and a tensor's memory layout always follows its shape.

        Raises:
            SpecError: The recipe cannot be followed by Paddle on this device, or freezes all parameters.
        """
        paddle_limits.check(recipe, on_cpu=self.device == "cpu")
        precision.check(recipe.precision)
        paddle.seed(recipe.seed)
        model = self._place(build(), recipe)
        state.check_equal_start(model, self.collective)
        model.train()
        if all(parameter.stop_gradient for parameter in model.parameters()):
            raise SpecError(f"train.freeze: {list(recipe.frozen)} leaves no parameter to train; freeze fewer")
        called, exchange = wrap(model, recipe)
        optimizer = PaddleOptimizer(model, recipe, exchange=exchange, collective=self.collective)
        self._recipe = recipe
        return called, optimizer

    def _place(self, model: Layer, recipe: Recipe) -> Layer:
        for name, parameter in model.named_parameters():
            if is_frozen(name, recipe.frozen):
                parameter.stop_gradient = True
        syncbn.freeze(model)
        if recipe.sync_batchnorm and self.collective.size > 1:
            syncbn.synchronize(model, self.collective)
        return model.to(dtype="float64") if recipe.precision == "fp64" else model

    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        """See ``Backend.batches``."""
        return batches.upload(loader, self.device)

    def infer(self, model: Layer, batch: Batch) -> dict[str, Array]:
        """See ``Backend.infer``."""
        assert self._recipe is not None, "prepare comes first"
        with paddle.no_grad(), precision.forward_context(self._recipe.precision):
            output: dict[str, Any] = inner(model)(batch)
        return {name: state.to_numpy(x) for name, x in output.items()}

    def state(self, model: Layer, optimizer: PaddleOptimizer) -> State:
        """See ``Backend.state``.

        Sets the buffers of all ranks to rank 0's, so that training continues with what is saved.
        """
        model = inner(model)
        ema = optimizer.ema()
        parameters = {name for name, _ in model.named_parameters()}
        self.collective.broadcast_([*model.buffers(), *(x for name, x in ema.items() if name not in parameters)])
        return State(
            weights=state.arrays(model),
            ema={name: state.to_numpy(x) for name, x in ema.items()},
            moments={name: state.to_numpy(x) for name, x in optimizer.moments().items()},
            counters=optimizer.counters(),
        )

    def restore(self, model: Layer, optimizer: PaddleOptimizer, saved: State) -> None:
        """See ``Backend.restore``."""
        model = inner(model)
        if saved.weights:
            state.fill(model.state_dict(), saved.weights, what="weights")
        if saved.ema and optimizer.ema():
            state.fill(optimizer.ema(), saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            state.fill(optimizer.moments(), saved.moments, what="optimizer moments")
        if saved.counters:
            optimizer.set_counters(saved.counters)
        state.check_equal_start(model, self.collective)

    def measure(self) -> dict[str, float]:
        """See ``Backend.measure``."""
        measured = {"memory_bytes": float(device.peak_memory_bytes(self.device))}
        return measured if self.waits is None else {**measured, "communication_s": self.waits.seconds}

    def time_waits(self) -> None:
        """See ``Backend.measure``. Does nothing on a GPU, where the device waits and not the process."""
        if self.device == "cpu":
            self.waits = self.collective.time_waits()


def of_one_rank(target: str) -> PaddleEngine:
    """Make the engine of a job with one rank."""
    return PaddleEngine(LocalCollective(), target)


def inner(model: Layer) -> Layer:
    """Return the model that was built, without the layer that a backend wrapped around it."""
    return model._layers if isinstance(model, paddle.DataParallel) else model
