"""The engine that every backend on Paddle shares: one rank's device, its model, its batches, and its state as numpy."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends import paddle_limits
from mtrain.backends._kernels import library
from mtrain.backends._paddle import device, internals, precision, quantising, recompute, state, syncbn
from mtrain.backends._paddle.collective import LocalCollective, PaddleCollective
from mtrain.backends._paddle.optimizer import Exchange, PaddleOptimizer
from mtrain.backends.base import Check
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Array, Batch, Capabilities, HostBatch, Narrow, RankSession, Recipe, State
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.network.quantising import fit_ranges
from mtrain.core.overriding import override
from mtrain.core.state.checks import aliases
from mtrain.core.update.recipe import is_frozen, nothing_to_train
from mtrain.errors import SpecError

log = logging.getLogger(__name__)


class NoExchange:
    """The exchange of a job with one rank, whose gradient already is the mean."""

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing around a micro batch."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: there is nothing to exchange."""


class PaddleEngine(RankSession):
    """One rank of a job on Paddle: the session of every backend on Paddle.

    A backend with several ranks overrides ``wrap``.
    """

    collective: PaddleCollective

    def __init__(self, collective: PaddleCollective, target: str, *, check: Check | None = None) -> None:
        """Make the engine of one rank.

        Args:
            collective: The ranks of the job.
            target: Paddle's name of this rank's device, which ``device.choose`` has made the current one.
            check: The ``Backend.check`` of the backend; None: no recipe is refused.
        """
        self.collective = collective
        self.target = target
        self.waits: Waits | None = None
        self.late_figures: bool | Literal["auto"] = "auto"
        """The backend's option ``late_figures``."""
        self.late = False
        """See ``Capabilities.late``; ``prepare`` sets it."""
        self._check = check
        self._recipe: Recipe | None = None

    @property
    @override
    def device(self) -> str:
        return device.named(self.target)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            late=self.late,
            fast_bf16=device.fast_bf16(self.target),
            seed=device.seed,
            time_waits=self.time_waits,
            profile=self.profile,
            own_order=True,
            follow=self.follow,
        )

    @override
    def prepare(self, build: Callable[[], Layer], recipe: Recipe) -> tuple[Layer, PaddleOptimizer]:
        """See ``RankSession.prepare``.

        The recipe's ``channels_last`` changes nothing: Paddle stores the weights of a convolution as (out, in, h, w)
        for any layout of its input, and a tensor's memory layout always follows its shape.

        Raises:
            SpecError: The recipe cannot be followed by Paddle on this device, or freezes all parameters.
        """
        on_cpu = self.target == "cpu"
        if self._check is not None:
            self._check(recipe, size=self.collective.size, on_cpu=on_cpu)
        paddle_limits.check(recipe, on_cpu=on_cpu)
        precision.check(recipe.precision)
        if self._recipe is None or not (recipe.own_order or recipe.named):
            paddle.seed(recipe.seed)
        model = self._place(build(), recipe)
        state.check_equal_start(model, self.collective)
        model.train()
        if not recipe.trained:
            return self._prepare_untrained(model, recipe)
        if all(parameter.stop_gradient for parameter in model.parameters()):
            raise SpecError(nothing_to_train(recipe))
        called, exchange = self.wrap_for_own_order(model, recipe) if recipe.own_order else self.wrap(model, recipe)
        optimizer = PaddleOptimizer(model, recipe, exchange=exchange, collective=self.collective)
        wanted = not on_cpu if self.late_figures == "auto" else self.late_figures
        self.late = wanted and optimizer.can_be_late
        optimizer.follow_ranges(quantising.ranges(model, recipe, self.collective))
        self._recipe = recipe
        return called, optimizer

    def _prepare_untrained(self, model: Layer, recipe: Recipe) -> tuple[Layer, PaddleOptimizer]:
        """Return what ``prepare`` returns for a model that was placed and that no update changes."""
        for parameter in model.parameters():
            parameter.stop_gradient = True
        self._recipe = recipe
        return model, PaddleOptimizer(model, recipe, exchange=NoExchange(), collective=self.collective)

    def follow(self, target: Prepared, source: Prepared, share: float, copies_buffers: bool) -> None:  # noqa: FBT001
        """See ``Capabilities.follow``: ``target += share * (source - target)``, or a copy for a share of 1."""
        own_model, other_model = inner(target[0]), inner(source[0])
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

    def wrap(self, model: Layer, recipe: Recipe) -> tuple[Layer, Exchange]:
        """Return the layer that is called in training, and how its gradients are exchanged.

        The default leaves the model unchanged and exchanges nothing, as is right for one rank.
        """
        return model, NoExchange()

    def wrap_for_own_order(self, model: Layer, recipe: Recipe) -> tuple[Layer, Exchange]:
        """Return what ``wrap`` returns for a model on which nothing may hang, see ``Recipe.own_order``.

        Raises:
            SpecError: The precision is mixed: Paddle keeps converted weights, of which a script may change some in between.
        """
        if recipe.precision in precision.HALF:
            raise SpecError(
                f"session.prepare: precision {recipe.precision} given with a name or overlap=False, which Paddle does not "
                "combine; use fp32"
            )
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        return model, NoExchange() if self.collective.size == 1 else AfterBackward(trained, self.collective)

    def _place(self, model: Layer, recipe: Recipe) -> Layer:
        check_layer(model)
        for name, parameter in model.named_parameters():
            if is_frozen(name, recipe.frozen):
                parameter.stop_gradient = True
        quantising.attach(model, recipe)
        if recipe.trained:
            syncbn.freeze(model)
        if recipe.sync_batchnorm and self.collective.size > 1:
            syncbn.synchronize(model, self.collective)
        if recipe.kernels == "auto" and self.target == "cpu" and recipe.precision != "fp64":
            self._use_kernels(model)
        recompute.attach(model, recipe)
        return model.to(dtype="float64") if recipe.precision == "fp64" else model

    def _use_kernels(self, model: Layer) -> None:
        """Use mtrain's own kernels if every rank has them: which rank computes a sample must not change its bits."""
        missing = [reason for reason in self.collective.all_gather(library.load_planes().reason) if reason]
        if not missing:
            syncbn.use_kernels(model)
        elif self.collective.rank == 0:
            log.warning("train.kernels: BatchNorm is Paddle's, slower and with other last bits: %s", missing[0])

    @override
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        return upload(loader, self.target)

    @override
    def infer(self, model: Layer, batch: Batch, *, narrow: Narrow | None = None) -> dict[str, Array]:
        assert self._recipe is not None, "prepare comes first"
        with paddle.no_grad(), precision.forward_context(self._recipe.precision):
            output: Mapping[str, Any] = inner(model)(batch)
            if narrow is not None:
                output = narrow(output)
        return {name: state.to_numpy(x) for name, x in output.items()}

    @override
    def state(self, model: Layer, optimizer: PaddleOptimizer) -> State:
        """See ``RankSession.state``.

        Sets the buffers of all ranks to rank 0's, so that training continues with what is saved.
        """
        optimizer.settle()
        model = inner(model)
        ema = optimizer.ema()
        parameters = {name for name, _ in model.named_parameters()}
        parameters |= aliases(model.state_dict()).keys()  # a tied weight has an entry for each of its names
        self.collective.broadcast_([*model.buffers(), *(x for name, x in ema.items() if name not in parameters)])
        return State(
            weights=state.arrays(model),
            ema={name: state.to_numpy(x) for name, x in ema.items()},
            moments={name: state.to_numpy(x) for name, x in optimizer.moments().items()},
            counters=optimizer.counters(),
        )

    @override
    def restore(self, model: Layer, optimizer: PaddleOptimizer, saved: State) -> None:
        optimizer.settle()
        model = inner(model)
        saved = fit_ranges(saved, model.state_dict())
        if saved.weights:
            state.fill(model.state_dict(), saved.weights, what="weights")
            optimizer.ranges_restored()
        if saved.ema and optimizer.ema():
            state.fill(optimizer.ema(), saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            optimizer.expect_moments(saved.moments)
            state.fill(optimizer.moments(), saved.moments, what="optimizer moments")
        if saved.counters:
            optimizer.set_counters(saved.counters)
        state.check_equal_start(model, self.collective)

    @override
    def measure(self) -> dict[str, float]:
        measured = {"memory_bytes": float(device.peak_memory_bytes(self.target))}
        free_bytes = device.free_memory_bytes(self.target)
        if free_bytes is not None:
            measured["device_free_bytes"] = float(free_bytes)
        return measured if self.waits is None else {**measured, "communication_s": self.waits.seconds}

    def time_waits(self) -> None:
        """See ``Capabilities.time_waits``. Does nothing on a GPU, where the device waits and not the process."""
        if self.target == "cpu":
            self.waits = self.collective.time_waits()

    def profile(self, file: Path) -> AbstractContextManager[None]:
        """See ``Capabilities.profile``."""
        from mtrain.backends._paddle import profiling  # imports paddle.profiler, which training does not need

        return profiling.recorded(file, on_gpu=self.target != "cpu")


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


def inner(model: Layer) -> Layer:
    """Return the model that was built, without the layer that a backend wrapped around it."""
    return internals.unwrapped(model)


class AfterBackward:
    """The ``Exchange`` of a model on which nothing hangs, see that of torch."""

    def __init__(self, trained: Sequence[Tensor], collective: PaddleCollective) -> None:
        """Exchange the gradients of the parameters ``trained`` over the ranks of ``collective``."""
        self._parameters = trained
        self._collective = collective

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing around a micro batch."""
        return nullcontext()

    def finish(self) -> None:
        """Average the gradients over the ranks; every rank must call, for the same model.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent.
        """
        own_flags = np.array([float(p.grad is not None) for p in self._parameters], np.float32)
        flags = self._collective.all_reduce(own_flags, "max").tolist()
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
