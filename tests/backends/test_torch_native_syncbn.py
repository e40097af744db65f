"""torch's own SyncBatchNorm takes the place of mtrain's on CUDA; its forward over ranks needs a GPU and was not seen."""

import pytest
import torch
from torch import nn

from mtrain.backends._torch import syncbn
from mtrain.backends._torch.collective import DistributedCollective
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.nn import BatchNorm2d
from mtrain.backends.engine import LocalCollective
from mtrain.errors import SpecError
from tests.backends.recipes import recipe


class Two(DistributedCollective):
    """A rank of two, without the other one."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2


def test_cuda_over_torchs_process_group_has_it_and_nothing_else() -> None:
    assert syncbn.has_native(torch.device("cuda", 1), Two())
    assert not syncbn.has_native(torch.device("cpu"), Two())
    assert not syncbn.has_native(
        torch.device("cuda", 0), LocalCollective()
    )  # as Horovod, whose ranks have no such group


@pytest.mark.parametrize("native", [False, True])
def test_an_engine_takes_what_its_device_has(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(syncbn, "has_native", lambda device, collective: native)
    engine = TorchEngine(Two(), torch.device("cpu"))
    model = engine._place(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNorm2d(4)), recipe(sync_batchnorm=True))
    assert isinstance(model[1], syncbn.NativeSyncBatchNorm if native else syncbn.SyncBatchNorm2d)


@pytest.mark.parametrize("unbiased", [False, True])
def test_it_keeps_names_values_and_the_estimate_of_the_variance(unbiased: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(BatchNorm2d(3, momentum=0.3, unbiased_variance=unbiased)).double() for _ in range(2)]
    names = list(layers[0].state_dict())
    syncbn.use_native(layers[0])
    assert list(layers[0].state_dict()) == names
    inputs = [torch.randn(2, 3, 2, 2, dtype=torch.float64) for _ in range(3)]
    for x in inputs:
        outcomes = []
        for layer in layers:
            own = x.clone().requires_grad_(True)
            output = layer(own)
            output.square().sum().backward()
            outcomes.append((output, own.grad))
        for mine, other in zip(*outcomes, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    for name, value in layers[0].state_dict().items():
        torch.testing.assert_close(value, layers[1].state_dict()[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layers[0].eval()(inputs[0]), layers[1].eval()(inputs[0]), rtol=1e-12, atol=1e-12)


def test_frozen_layers_stay_and_layers_of_other_classes_are_refused() -> None:
    frozen = nn.Sequential(nn.BatchNorm2d(3))
    frozen[0].weight.requires_grad = False
    syncbn.freeze(frozen)
    syncbn.use_native(frozen)
    assert isinstance(frozen[0], syncbn.FrozenBatchNorm2d)

    class Strange(nn.BatchNorm2d):
        """A BatchNorm of its own class."""

    with pytest.raises(SpecError, match="is a Strange, a BatchNorm of its own class"):
        syncbn.use_native(nn.Sequential(Strange(3)))
