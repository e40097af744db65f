"""The backend plugin ``fsdp``: its options, and how it joins and leaves the ranks.

Importing it imports no framework.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mtrain.backends.torch_backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.recipe import check_parts
from mtrain.errors import SpecError
from mtrain.spec import package_parts

if TYPE_CHECKING:
    from mtrain.backends._fsdp.engine import FsdpEngine


class Fsdp(TorchBackend):
    """``mtrain.core.interfaces.Backend`` over FSDP2; started by torchrun or anything that sets its variables."""

    class Options(TorchOptions):
        """Options of backend ``fsdp``."""

        timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")
        unit: Literal["blocks", "children", "model"] = Field(
            "blocks",
            description="what is gathered at a time: each block, where the model says or shows what its blocks are, else as with "
            "children; each of its direct children; or the whole model",
        )

    rendezvous = "torch"
    takes_meshes = True

    _engine: FsdpEngine | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        check_parts(recipe, splits="backend fsdp")
        if recipe.mesh is not None and recipe.mesh.tensor * recipe.mesh.pipeline > 1:
            package_parts.require(
                "meshes", "layers", "parallel.tensor" if recipe.mesh.tensor > 1 else "parallel.pipeline"
            )
        if recipe.prune is not None:
            raise SpecError(
                "train.prune: given with backend fsdp, which splits weights over the ranks, but masks need whole ones; use "
                "another backend"
            )
        if recipe.compile:
            given = "blocks" if recipe.compile_blocks else "true"
            raise SpecError(f"train.compile: {given} given with backend fsdp; use false")

    @override
    def __enter__(self) -> FsdpEngine:
        # Parts of this module hold on to the process group that exists when they are imported, and so keep its threads
        # alive. It is therefore imported before the group is made.
        import torch.distributed.fsdp  # noqa: F401

        from mtrain.backends._torch import device
        from mtrain.backends._torch.ranks import group

        options = self.options
        target, timeout = device.of_this_rank(options), timedelta(seconds=options.timeout_s)
        collective = group.connect("fsdp", target, timeout=timeout)
        from mtrain.backends._fsdp.engine import FsdpEngine

        self._engine = FsdpEngine(collective, target, unit=options.unit, check=self.check)
        self._engine.late_figures = options.late_figures
        self._engine.keep_memory = options.keep_memory
        self._engine.timeout = timeout
        return self._engine

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends._fsdp.internals import forget_meshes

        super().__exit__(*error)
        forget_meshes()
