"""Backend ``ddp``: many ranks with torch's ``DistributedDataParallel``, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.errors import SpecError

if TYPE_CHECKING:
    from mtrain.backends._torch.ddp_engine import DdpEngine


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

        def allows_static_graph(self, recipe: Recipe) -> bool:
            """Return whether DDP allows a static graph: it excludes ``no_sync``, which accumulation needs."""
            return recipe.accumulate == 1 and not self.find_unused_parameters

    rendezvous = "torch"

    _engine: DdpEngine | None = None

    options: Options

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        if self.options.static_graph is True and not self.options.allows_static_graph(recipe):
            raise SpecError(
                f"backend.options.static_graph: true given with {recipe.accumulate} micro batches per update and "
                f"find_unused_parameters {self.options.find_unused_parameters}; expected 1 and false: use `auto`"
            )

    @override
    def __enter__(self) -> DdpEngine:
        from mtrain.backends._torch import device
        from mtrain.backends._torch.ddp_engine import DdpEngine
        from mtrain.backends._torch.ranks import group

        target = device.of_this_rank(self.options)
        collective = group.connect("ddp", target, timeout=timedelta(seconds=self.options.timeout_s))
        self._engine = DdpEngine(collective, target, options=self.options, check=self.check)
        self._engine.late_figures = self.options.late_figures
        return self._engine
