"""Backend ``ddp``: many ranks with torch's ``DistributedDataParallel``, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Module, Optimizer, Recipe
from mtrain.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

    from mtrain.backends._torch.deterministic_buckets import DeterministicBucketsDDP
    from mtrain.backends._torch.optimizer import Exchange


class DDP(TorchBackend):
    """``core.interfaces.Backend`` over torch.distributed; started by torchrun or anything that sets its variables."""

    class Options(TorchOptions):
        """Options of backend ``ddp``."""

        timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")
        bucket_mb: float = Field(25.0, gt=0, description="gradients are exchanged in buckets of this size")
        static_graph: bool | Literal["auto"] = Field(
            "auto", description="the same parameters take part in every update; auto: where accumulation allows it"
        )
        find_unused_parameters: bool = Field(
            default=False,
            description="for models that leave out parameters in some updates; needs static_graph false or auto",
        )

    rendezvous: ClassVar[str] = "torch"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._wrapped: weakref.WeakSet[DeterministicBucketsDDP] = weakref.WeakSet()

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """See ``Backend.prepare``."""
        if self.options.static_graph is True and not self._may_be_static(recipe):
            raise SpecError(
                f"backend.options.static_graph: true given with {recipe.accumulate} micro batches per update and "
                f"find_unused_parameters {self.options.find_unused_parameters}; expected 1 and false: use `auto`"
            )

    def _may_be_static(self, recipe: Recipe) -> bool:
        """Return whether DDP allows a static graph: it excludes ``no_sync``, which accumulation needs."""
        return recipe.accumulate == 1 and not self.options.find_unused_parameters

    def __enter__(self) -> Self:
        # This module's functions bind the default group that exists at import time as a default argument. DDP imports
        # the module; if that happened after the group is made, it would keep the group and its threads alive beyond
        # __exit__.
        import torch.distributed.nn.functional  # noqa: F401
        from torch import distributed as dist

        from mtrain.backends._torch import device, group
        from mtrain.backends._torch.collective import DistributedCollective
        from mtrain.backends._torch.engine import TorchEngine

        local_rank = dist.get_node_local_rank(fallback_rank=0)
        target = device.choose(
            self.options.device, local_rank=local_rank, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        on_cuda = target.type == "cuda"
        timeout = timedelta(seconds=self.options.timeout_s)
        group.join("ddp", on_cuda=on_cuda, timeout=timeout)
        host_group = dist.new_group(backend="gloo", timeout=timeout) if on_cuda else None
        self._entered = TorchEngine(DistributedCollective(local_rank=local_rank, host_group=host_group), target)
        return self

    def __exit__(self, *error: object) -> None:
        from mtrain.backends._torch import group

        if self._entered is not None:
            self._entered.collective.close()
        self._entered = None
        for wrapped in self._wrapped:
            wrapped.release()
        group.leave(failed=bool(error) and error[0] is not None)

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """See ``Backend.prepare``."""
        self.check(recipe, size=self.collective.size, on_cpu=self.device == "cpu")
        return self.engine.prepare(build, recipe, self._wrap)

    def _wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        from mtrain.backends._torch.deterministic_buckets import DeterministicBucketsDDP

        static_graph = self.options.static_graph
        wrapped = DeterministicBucketsDDP(
            model,
            device_ids=[self.engine.device] if self.engine.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,
            static_graph=self._may_be_static(recipe) if static_graph == "auto" else static_graph,
        )
        self._wrapped.add(wrapped)
        return wrapped, _Exchange(wrapped, self.engine.waits)


class _Exchange:
    """The exchange of DDP, which averages gradients in the backward pass of the last micro batch."""

    def __init__(self, wrapped: Any, waits: Waits | None) -> None:
        self._wrapped = wrapped
        self._waits = waits
        if waits is not None:
            # By default DDP times only a sample of the updates.
            wrapped._set_ddp_runtime_logging_sample_rate(1)

    def during(self, *, last: bool) -> AbstractContextManager[object]:
        """Suppress DDP's exchange before the last micro batch."""
        return nullcontext() if last else self._wrapped.no_sync()

    def finish(self) -> None:
        """Add up waiting time where it is measured; the exchange itself ended with the last backward pass."""
        if self._waits is not None:
            self._waits.seconds += _exposed_s(self._wrapped)


def _exposed_s(wrapped: Any) -> float:
    """Return the seconds from the last gradient of a backward pass to the end of its exchange, by DDP's clocks."""
    wrapped.logger.set_runtime_stats_and_log()
    times_ns = wrapped._get_ddp_logging_data()
    return max(0.0, 1e-9 * (times_ns["backward_comm_time_end"] - times_ns["backward_compute_time_end"]))
