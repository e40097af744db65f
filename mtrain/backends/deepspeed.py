"""Backend ``deepspeed``: many ranks with DeepSpeed ZeRO, which splits optimizer state, gradients and weights.

Ranks communicate by gloo on the CPU and by NCCL on CUDA.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mtrain.backends._deepspeed.settings import Sharding, check_extra
from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.recipe import check_parts
from mtrain.errors import SpecError

if TYPE_CHECKING:
    from mtrain.backends._deepspeed.engine import ZeroEngine


class DeepSpeed(TorchBackend):
    """``core.interfaces.Backend`` over DeepSpeed; started by torchrun or anything that sets its variables."""

    class Options(TorchOptions):
        """Options of backend ``deepspeed``."""

        stage: Literal[0, 1, 2, 3] = Field(
            1,
            description="what is split over ranks: 0 nothing, 1 moments, averages and float32 weights of the optimizer, "
            "2 gradients too (with reduction micro_batch), 3 the model's weights too",
        )
        offload: bool = Field(default=False, description="the split optimizer state is in host memory; stage 1, 2 or 3")
        bucket_mb: float = Field(25.0, gt=0, description="arrays are exchanged in buckets of this size")
        reduction: Literal["update", "micro_batch"] = Field(
            "update",
            description="update: gradients are summed over ranks once per update, with the rounding of ddp; micro_batch: in "
            "every backward pass, so that stages 2 and 3 keep only parts of them",
        )
        config: dict[str, Any] = Field(
            default_factory=dict, description="further keys of DeepSpeed's JSON, those that change no training"
        )
        timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")

        @field_validator("config")
        @classmethod
        def _known_keys(cls, config: dict[str, Any]) -> dict[str, Any]:
            check_extra(config)
            return config

        @model_validator(mode="after")
        def _something_to_offload(self) -> Self:
            if self.offload and self.stage == 0:
                raise ValueError("offload: true given with stage 0, which splits nothing; use stage 1, 2 or 3")
            return self

    rendezvous = "torch"

    _engine: ZeroEngine | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        if self.options.stage > 0:
            check_parts(recipe, splits=f"backend.options.stage {self.options.stage}")
        if recipe.prune is not None and self.options.stage > 0:
            raise SpecError(
                f"train.prune: given with backend.options.stage {self.options.stage}, which splits weights over the ranks, but "
                "masks need whole ones; use stage 0, or another backend"
            )
        if recipe.compile and self.options.stage == 3:
            raise SpecError("train.compile: given with backend.options.stage 3; use stage 0, 1 or 2, or compile false")

    @override
    def __enter__(self) -> ZeroEngine:
        from mtrain.backends._deepspeed import library
        from mtrain.backends._torch import device
        from mtrain.backends._torch.ranks import group

        options = self.options
        target, timeout = device.of_this_rank(options), timedelta(seconds=options.timeout_s)
        library.load(target.type)
        collective = group.connect("deepspeed", target, timeout=timeout)
        library.start(backend="nccl" if target.type == "cuda" else "gloo", timeout=timeout)
        from mtrain.backends._deepspeed.engine import ZeroEngine

        sharding = Sharding(
            stage=options.stage,
            offload=options.offload,
            bucket_mb=options.bucket_mb,
            reduction=options.reduction,
            extra=options.config,
        )
        self._engine = ZeroEngine(collective, target, sharding, check=self.check)
        self._engine.late_figures = options.late_figures
        self._engine.keep_memory = options.keep_memory
        self._engine.timeout = timeout
        return self._engine

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends._deepspeed import library

        if self._engine is not None:
            self._engine.close()
        self._engine = None
        library.stop()  # DeepSpeed's own groups end before the default one, which `super` leaves
        super().__exit__(*error)
