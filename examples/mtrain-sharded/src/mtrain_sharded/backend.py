"""The backend plugin ``sharded``: its options, and how it joins and leaves the ranks.

Importing it imports no framework.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from mtrain.backends.torch_backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import Recipe
from mtrain.core.update.recipe import check_parts
from mtrain.errors import SpecError

if TYPE_CHECKING:
    from mtrain_sharded.engine import ShardedEngine


class Sharded(TorchBackend):
    """``mtrain.core.interfaces.Backend`` over FSDP2; started by torchrun or anything that sets its variables."""

    class Options(TorchOptions):
        """Options of backend ``sharded``."""

        timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")

    rendezvous = "torch"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._engine: ShardedEngine | None = None

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        check_parts(recipe, splits="backend sharded")
        if recipe.prune is not None:
            raise SpecError(
                "train.prune: given with backend sharded, but masks need whole weights; use another backend"
            )
        if recipe.compile:
            raise SpecError("train.compile: true given with backend sharded; use false")

    @override
    def __enter__(self) -> ShardedEngine:
        # Parts of this module hold on to the process group that exists when they are imported, and so keep its threads
        # alive. It is therefore imported before the group is made.
        import torch.distributed.fsdp  # noqa: F401
        from torch import distributed as dist

        from mtrain.backends.torch_engine import DistributedCollective, choose_device, join_group
        from mtrain_sharded.engine import ShardedEngine

        options = self.options
        local_rank = dist.get_node_local_rank(fallback_rank=0)
        target = choose_device(options.device, local_rank=local_rank, tf32=options.tf32, keep=options.keep_memory)
        timeout, on_cuda = timedelta(seconds=options.timeout_s), target.type == "cuda"
        join_group("sharded", on_cuda=on_cuda, timeout=timeout)
        # Numpy arrays and objects travel over gloo, so that they never wait for a device.
        host_group = dist.new_group(backend="gloo", timeout=timeout) if on_cuda else None
        collective = DistributedCollective(host_group=host_group)
        self._engine = ShardedEngine(collective, target, check=self.check)
        self._engine.late_figures = options.late_figures
        self._engine.timeout = timeout
        return self._engine

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends.torch_engine import leave_group
        from mtrain_sharded.internals import forget_meshes

        if self._engine is not None:
            self._engine.close()
        self._engine = None
        leave_group(failed=bool(error) and error[0] is not None)
        forget_meshes()
