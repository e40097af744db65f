"""Many ranks through ``torch.nn.parallel.DistributedDataParallel``: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.core.errors import LaunchError, SpecError
from mtrain.core.interfaces import Module, Optimizer, Recipe

if TYPE_CHECKING:
    from torch import nn

    from mtrain.backends._torch.optimizer import Exchange
    from mtrain.backends._torch.rehearsed import RehearsedDDP


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
        self._wrapped: weakref.WeakSet[RehearsedDDP] = weakref.WeakSet()

    def __enter__(self) -> Self:
        # Its functions take the group of the moment of import as a default argument; DDP imports it. Imported after the
        # group is made, they would keep the group, and its threads, alive beyond __exit__.
        import torch.distributed.nn.functional  # noqa: F401
        from torch import distributed as dist

        from mtrain.backends._torch import device
        from mtrain.backends._torch.collective import DistributedCollective
        from mtrain.backends._torch.engine import TorchEngine

        local_rank = dist.get_node_local_rank(fallback_rank=0)
        target = device.choose(
            self.options.device, local_rank=local_rank, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        on_cuda = target.type == "cuda"
        timeout = timedelta(seconds=self.options.timeout_s)
        try:
            dist.init_process_group("nccl" if on_cuda else "gloo", init_method="env://", timeout=timeout)
        except ValueError as error:
            raise LaunchError(
                f"backend ddp was not started by torchrun: {error}; use `mtrain -c SPEC --backend ddp`, or "
                "`torchrun -m mtrain.worker`"
            ) from error
        host_group = dist.new_group(backend="gloo", timeout=timeout) if on_cuda else None
        self._entered = TorchEngine(DistributedCollective(local_rank=local_rank, host_group=host_group), target)
        return self

    def __exit__(self, *error: object) -> None:
        from torch import distributed as dist

        if self._entered is not None:
            self._entered.collective.close()
        self._entered = None
        for wrapped in self._wrapped:
            wrapped.release()
        if not dist.is_initialized():
            return
        if error and error[0] is not None and dist.get_backend() == "nccl":
            # Peers may never answer: give kernels in flight up instead of waiting for them.
            dist.distributed_c10d._abort_process_group()
            return
        dist.destroy_process_group()

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """See ``Backend.prepare``."""
        return self.engine.prepare(build, recipe, self._wrap)

    def _wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        from mtrain.backends._torch.rehearsed import RehearsedDDP

        # no_sync and a static graph exclude each other.
        legal = recipe.accumulate == 1 and not self.options.find_unused_parameters
        wanted = self.options.static_graph
        if wanted is True and not legal:
            raise SpecError(
                f"backend.options.static_graph: true given with {recipe.accumulate} micro batches per update and "
                f"find_unused_parameters {self.options.find_unused_parameters}; expected 1 and false: use `auto`"
            )
        wrapped = RehearsedDDP(
            model,
            device_ids=[self.engine.device] if self.engine.device.type == "cuda" else None,
            forward_sync_buffers=False,
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,
            static_graph=legal if wanted == "auto" else wanted,
        )
        self._wrapped.add(wrapped)
        return wrapped, _Exchange(wrapped)


class _Exchange:
    """DDP averages gradients in the backward pass of the last micro batch."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def during(self, *, last: bool) -> AbstractContextManager[object]:
        """No exchange before the last."""
        return nullcontext() if last else self._wrapped.no_sync()

    def finish(self) -> None:
        """Nothing: it is done when the last backward returns."""
