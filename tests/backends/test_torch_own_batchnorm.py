"""torch's own BatchNorm layers, as users' models have them, over ranks: equal to one rank that has all samples."""

import pytest
import torch
from torch import nn

from mtrain.backends._torch import syncbn
from mtrain.backends.engine import LocalCollective
from mtrain.errors import SpecError

SHAPES = {nn.BatchNorm1d: [(6, 3), (6, 3, 5)], nn.BatchNorm2d: [(6, 3, 4, 2)], nn.BatchNorm3d: [(4, 3, 2, 2, 3)]}
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize(
    "settings", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_one_rank_computes_what_torch_computes(kind, shape, settings) -> None:
    generator = torch.Generator().manual_seed(0)
    results = []
    for synchronised in (False, True):
        layer = kind(3, **settings).double()
        if synchronised:
            syncbn.synchronize(layer, LocalCollective())
        generator.manual_seed(0)
        outputs = []
        for _ in range(2):
            inputs = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 5).requires_grad_()
            output = layer(inputs)
            output.square().mul(torch.arange(output.numel()).view(shape)).sum().backward()
            outputs += [output.detach(), inputs.grad]
        outputs += [p.grad for p in layer.parameters()] + list(layer.state_dict().values())
        results.append([*outputs, layer.eval()(inputs.detach())])
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)


def test_a_class_of_its_own_is_refused_by_name() -> None:
    class Mine(nn.BatchNorm1d):
        pass

    model = nn.Sequential(nn.Linear(2, 3), Mine(3))
    with pytest.raises(SpecError, match="but 1 is a Mine, a BatchNorm of its own class"):
        syncbn.synchronize(model, LocalCollective())


@pytest.mark.parametrize("kind", SHAPES)
def test_a_frozen_one_keeps_its_running_statistics(kind) -> None:
    layer = kind(3)
    layer.weight.requires_grad = False
    model = nn.Sequential(layer)
    syncbn.freeze(model)
    syncbn.synchronize(model, LocalCollective())
    model.train()
    inputs = torch.randn(SHAPES[kind][0]) + 7
    torch.testing.assert_close(layer(inputs), inputs, rtol=1e-4, atol=1e-4)
    assert not layer.running_mean.any()
