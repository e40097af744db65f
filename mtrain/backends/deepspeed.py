"""Backend ``deepspeed``: many ranks with DeepSpeed ZeRO, which splits optimizer state, gradients and weights.

Ranks communicate by gloo on the CPU and by NCCL on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mtrain.backends._deepspeed.settings import Sharding, check_extra, settings
from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.core.interfaces import PlannedArray, Recipe
from mtrain.core.overriding import override
from mtrain.core.ranks import rings
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
    def sent_per_update(
        self, arrays: Sequence[PlannedArray], recipe: Recipe, *, size: int, on_cpu: bool
    ) -> float | None:
        return bytes_sent_per_update(arrays, recipe, self._sharding, size=size, on_cpu=on_cpu)

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

        self._engine = ZeroEngine(collective, target, self._sharding, check=self.check)
        self._engine.late_figures = options.late_figures
        self._engine.keep_memory = options.keep_memory
        self._engine.timeout = timeout
        return self._engine

    @property
    def _sharding(self) -> Sharding:
        options = self.options
        return Sharding(
            stage=options.stage,
            offload=options.offload,
            bucket_mb=options.bucket_mb,
            reduction=options.reduction,
            extra=options.config,
        )

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends._deepspeed import library

        if self._engine is not None:
            self._engine.close()
        self._engine = None
        library.stop()  # DeepSpeed's own groups end before the default one, which `super` leaves
        super().__exit__(*error)


def bytes_sent_per_update(
    arrays: Sequence[PlannedArray], recipe: Recipe, sharding: Sharding, *, size: int, on_cpu: bool
) -> float | None:
    """Return the bytes that each of ``size`` ranks sends; None: not known. See ``Backend.sent_per_update``."""
    if sharding.stage == 0:
        return rings.of_gradients(arrays, recipe, size=size)
    zero = settings(recipe, sharding, size=size, pin_memory=False)["zero_optimization"]
    exchanges = recipe.accumulate if sharding.reduction == "micro_batch" else 1
    if sharding.stage == 3:
        return _of_split_weights(arrays, recipe, zero, exchanges=exchanges, size=size, on_cpu=on_cpu)
    trained = [array.length for array in arrays if array.trained]
    each = rings.element_bytes(recipe)
    share = _pad(sum(trained), size)
    # Gradients are added up on all ranks, and weights gathered after the update.
    own = exchanges * rings.of_gradients(arrays, recipe, size=size) + rings.all_gather(share * each, size=size)
    longest = _longest_of_split(trained, share=share, size=size, bucket=zero["reduce_bucket_size"])
    return own + rings.all_gather(longest * each, size=size)


def _pad(length: int, size: int) -> int:
    """Return the length of the equal shares of a vector of ``length`` elements."""
    return 2 * -(-length // (2 * size))  # DeepSpeed pads the vector to a multiple of twice the number of ranks


def _longest_of_split(lengths: Sequence[int], *, share: int, size: int, bucket: int) -> int:
    """Return how many elements are gathered from each rank to take the norms of arrays that lie on several.

    A gather takes about ``bucket`` elements, and as many from each rank as from that with most of them.
    """
    total, gathered, start = 0, 0, 0
    parts = [0] * size
    for length in lengths:
        first, end = start, start + length
        start = end
        if first // share == (end - 1) // share:
            continue
        if gathered and gathered + length > bucket:
            total, gathered, parts = total + max(parts), 0, [0] * size
        gathered += length
        for rank in range(first // share, (end - 1) // share + 1):
            parts[rank] += min(end, (rank + 1) * share) - max(first, rank * share)
    return total + max(parts)


def _of_split_weights(
    arrays: Sequence[PlannedArray], recipe: Recipe, zero: dict[str, int], *, exchanges: int, size: int, on_cpu: bool
) -> float | None:
    """Return what a rank sends in stage 3, in which each rank has an equal part of every weight."""
    if sum(x.length for x in arrays) > min(zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]):
        return None  # weights are dropped within a pass and gathered again, nobody knows how often
    each = rings.element_bytes(recipe)
    gathered = exchanged = 0.0
    for x in arrays:
        part = -(-x.length // size)
        # A small weight stays whole on every rank, and is gathered after each update; a large one in each forward pass,
        # to be kept until the backward pass.
        is_small = x.length <= zero["stage3_param_persistence_threshold"]
        gathered += part * each * (1 if is_small else recipe.accumulate)
        if x.trained:
            gathered += part * each  # for norms with the bits of whole gradients
            exchanged += part * size * each
    return rings.all_gather(gathered, size=size) + exchanges * rings.reduce_scatter(exchanged, size=size, on_cpu=on_cpu)
