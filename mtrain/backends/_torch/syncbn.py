"""Replace the BatchNorm layers of a model by exact ones, synchronised ones (on the CPU too) or frozen ones."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from mtrain.backends._torch import batchnorm
from mtrain.backends._torch.collective import DistributedCollective, TorchCollective
from mtrain.backends._torch.internals import AnyBatchNorm
from mtrain.backends._torch.nn import BatchNorm2d
from mtrain.core.overriding import override
from mtrain.errors import SpecError


class SyncBatchNorm2d(BatchNorm2d):
    """A BatchNorm2d over the micro batches of all ranks; ``synchronize`` makes it.

    Names and state stay as they were.
    """

    collective: TorchCollective

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.normalize_batch(input, self.collective) if self.training else super().forward(input)


class _OverRanks(AnyBatchNorm):
    """torch's own BatchNorm layers, as users' models have them, over the micro batches of all ranks."""

    collective: TorchCollective

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        weight = input.new_ones(self.num_features) if self.weight is None else self.weight
        bias = input.new_zeros(self.num_features) if self.bias is None else self.bias
        planes_BCP1 = input.reshape(len(input), self.num_features, -1, 1)
        output, mean, var, count = batchnorm.normalize(
            planes_BCP1, weight, bias, eps=self.eps, collective=self.collective
        )
        self._follow(mean, var * (count / (count - 1)))
        return output.reshape(input.shape)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)


class _OwnBatchNorm1d(_OverRanks, nn.BatchNorm1d): ...


class _OwnBatchNorm2d(_OverRanks, nn.BatchNorm2d): ...


class _OwnBatchNorm3d(_OverRanks, nn.BatchNorm3d): ...


class _FrozenBatchNorm(AnyBatchNorm):
    """A BatchNorm with a frozen weight, which uses its running statistics in training mode too."""

    @override
    def train(self, mode: bool = True) -> "_FrozenBatchNorm":
        super().train(False)  # noqa: FBT003
        return self


class FrozenBatchNorm2d(_FrozenBatchNorm, nn.BatchNorm2d):
    silu: bool = False
    """Whether SiLU is part of the layer, as in the neutral BatchNorm2d that it was."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return F.silu(output) if self.silu else output


class _FrozenBatchNorm1d(_FrozenBatchNorm, nn.BatchNorm1d): ...


class _FrozenBatchNorm3d(_FrozenBatchNorm, nn.BatchNorm3d): ...


OVER_RANKS: Mapping[type[nn.Module], type[_OverRanks]] = {
    nn.BatchNorm1d: _OwnBatchNorm1d,
    nn.BatchNorm2d: _OwnBatchNorm2d,
    nn.BatchNorm3d: _OwnBatchNorm3d,
}
FROZEN: Mapping[type[nn.Module], type[_FrozenBatchNorm]] = {
    nn.BatchNorm1d: _FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: _FrozenBatchNorm3d,
}


def make_exact(model: nn.Module) -> None:
    """Give torch's own BatchNorm2d in ``model`` the exact statistics of the neutral one, in place.

    Models of plugins may use torch's layers. Layers without running statistics or without weights stay as they are.
    """
    for module in model.modules():
        if (
            type(module) is nn.BatchNorm2d
            and module.affine
            and module.track_running_stats
            and module.momentum is not None
        ):
            _turn_into(BatchNorm2d, module)


def use_kernels(model: nn.Module) -> None:
    """Make every BatchNorm2d of ``model`` use mtrain's own kernels where they fit, in place; they can be loaded here."""
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.kernels = True


class NativeSyncBatchNorm(nn.SyncBatchNorm):
    """torch's own SyncBatchNorm, a few kernels on CUDA, with the running variance that the layer had before."""

    unbiased_variance: bool
    silu: bool = False
    """Whether SiLU is part of the layer, as in the neutral BatchNorm2d that it was."""
    running_var: Tensor | None

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = self._normalize(input)
        return F.silu(output) if self.silu else output

    def _normalize(self, input: Tensor) -> Tensor:
        own = self.running_var
        if not self.training or self.unbiased_variance or own is None or self.momentum is None:
            return super().forward(input)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        count = ranks * input.numel() // input.shape[1]
        # torch follows the variance divided by (count - 1), in a scratch tensor, since autograd may have saved it.
        self.running_var = own.clone()
        try:
            output = super().forward(input)
            with torch.no_grad():
                kept = own * (1 - self.momentum)
                own.copy_(kept + (self.running_var - kept) * ((count - 1) / count))
        finally:
            self.running_var = own
        return output


def has_native(device: torch.device, collective: TorchCollective) -> bool:
    """Return whether torch's own SyncBatchNorm, which knows CUDA and torch's process groups alone, can be used."""
    return device.type == "cuda" and isinstance(collective, DistributedCollective)


def use_native(model: nn.Module) -> None:
    """Turn every trainable BatchNorm of ``model`` into torch's own SyncBatchNorm over all ranks, in place.

    Names and state stay as they were.

    Raises:
        SpecError: there is one of a class of its own, whose forward pass would be lost.
    """
    for module in _trainable(model):
        unbiased = getattr(module, "unbiased_variance", True)
        module.__class__ = NativeSyncBatchNorm
        native = cast(NativeSyncBatchNorm, module)
        native.unbiased_variance, native.process_group = unbiased, None


def _trainable(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms of ``model`` whose statistics can be taken over all ranks.

    Raises:
        SpecError: there is one of a class of its own, whose forward pass would be lost.
    """
    chosen: list[nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, AnyBatchNorm) or isinstance(module, _FrozenBatchNorm | nn.SyncBatchNorm):
            continue
        if type(module) not in OVER_RANKS and not isinstance(module, BatchNorm2d):
            raise SpecError(
                f"train.sync_batchnorm: true given, but {name or 'the model'} is a {type(module).__name__}, a BatchNorm of its "
                "own class; use one of torch.nn, or false"
            )
        chosen.append(module)
    return chosen


def synchronize(model: nn.Module, collective: TorchCollective) -> None:
    """Make every trainable BatchNorm of ``model`` take its statistics over all ranks, in place.

    Raises:
        SpecError: there is one of a class of its own, whose forward pass would be lost.
    """
    for module in _trainable(model):
        if type(module) in OVER_RANKS:
            module.__class__ = OVER_RANKS[type(module)]
        else:
            _turn_into(SyncBatchNorm2d, cast(BatchNorm2d, module))
        cast(SyncBatchNorm2d, module).collective = collective


def _turn_into(kind: type[BatchNorm2d], module: nn.BatchNorm2d) -> None:
    unbiased = getattr(module, "unbiased_variance", True)
    module.__class__ = kind
    cast(BatchNorm2d, module).unbiased_variance = unbiased


def freeze(model: nn.Module) -> None:
    """Make every BatchNorm of ``model`` whose weight takes no gradient keep its running statistics, in place."""
    for module in model.modules():
        if not isinstance(module, AnyBatchNorm) or module.weight is None or module.weight.requires_grad:
            continue
        kind = next((kind for kind in FROZEN if isinstance(module, kind)), None)
        if kind is not None:
            module.__class__ = FROZEN[kind]
            module.eval()
