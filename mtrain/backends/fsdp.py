"""The backend plugin ``fsdp``: its options, and how it joins and leaves the ranks.

Importing it imports no framework.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from mtrain.backends.torch_backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import Recipe
from mtrain.errors import SpecError

if TYPE_CHECKING:
    import torch

    from mtrain_fsdp.engine import FsdpEngine


class Fsdp(TorchBackend):
    """``mtrain.core.interfaces.Backend`` over FSDP2; started by torchrun or anything that sets its variables."""

    class Options(TorchOptions):
        """Options of backend ``fsdp``."""

        timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")
        unit: Literal["model", "children"] = Field(
            "children", description="what is gathered at a time: the whole model, or each of its direct children"
        )

    rendezvous = "torch"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._engine: FsdpEngine | None = None

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        if recipe.rule == "lamb":
            raise SpecError(
                "optimizer.rule: lamb given with backend fsdp, which splits arrays over the ranks, but the rule needs the "
                "lengths of whole ones; use another rule such as adamw, or a backend that keeps arrays whole"
            )

    @override
    def __enter__(self) -> FsdpEngine:
        # Parts of this module hold on to the process group that exists when they are imported, and so keep its threads
        # alive. It is therefore imported before the group is made.
        import torch.distributed.fsdp  # noqa: F401
        from torch import distributed as dist

        from mtrain.backends.torch_engine import choose_device, join_group

        options = self.options
        local_rank = dist.get_node_local_rank(fallback_rank=0)
        target = choose_device(options.device, local_rank=local_rank, tf32=options.tf32, keep=options.keep_memory)
        timeout = timedelta(seconds=options.timeout_s)
        join_group("fsdp", on_cuda=target.type == "cuda", timeout=timeout)
        self._engine = self._make_engine(target, local_rank=local_rank, timeout=timeout)
        self._engine.late_figures = options.late_figures
        return self._engine

    def _make_engine(self, target: torch.device, *, local_rank: int, timeout: timedelta) -> FsdpEngine:
        from torch import distributed as dist

        from mtrain.backends.torch_engine import DistributedCollective
        from mtrain_fsdp.engine import FsdpEngine

        # Numpy arrays and objects travel over gloo, so that they never wait for a device.
        host_group = dist.new_group(backend="gloo", timeout=timeout) if target.type == "cuda" else None
        collective = DistributedCollective(local_rank=local_rank, host_group=host_group)
        return FsdpEngine(collective, target, unit=self.options.unit)

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends.torch_engine import leave_group
        from mtrain_fsdp.internals import forget_meshes

        if self._engine is not None:
            self._engine.close()
        self._engine = None
        leave_group(failed=bool(error) and error[0] is not None)
        forget_meshes()
