"""Replace the BatchNorm layers of a model by exact ones, synchronised ones (on the CPU too) or frozen ones."""

from typing import cast

from torch import Tensor, nn
from typing_extensions import override

from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.nn import BatchNorm2d


class SyncBatchNorm2d(BatchNorm2d):
    """A BatchNorm2d over the micro batches of all ranks; ``synchronize`` makes it.

    Names and state stay as they were.
    """

    collective: TorchCollective

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.normalized(input, self.collective) if self.training else super().forward(input)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d with a frozen weight, which uses its running statistics in training mode too."""

    @override
    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        super().train(False)  # noqa: FBT003
        return self


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


def synchronize(model: nn.Module, collective: TorchCollective) -> None:
    """Make every trainable BatchNorm2d of ``model`` take its statistics over all ranks, in place."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, FrozenBatchNorm2d):
            _turn_into(SyncBatchNorm2d, module)
            cast(SyncBatchNorm2d, module).collective = collective


def _turn_into(kind: type[BatchNorm2d], module: nn.BatchNorm2d) -> None:
    unbiased = getattr(module, "unbiased_variance", True)
    module.__class__ = kind
    cast(BatchNorm2d, module).unbiased_variance = unbiased


def freeze(model: nn.Module) -> None:
    """Make every BatchNorm2d of ``model`` whose weight takes no gradient keep its running statistics, in place."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.weight is not None and not module.weight.requires_grad:
            module.__class__ = FrozenBatchNorm2d
            module.eval()
