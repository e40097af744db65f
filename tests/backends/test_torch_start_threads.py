"""Start values have the same bits whatever the number of threads with which the rank computes."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends.engine import LocalCollective
from mtrain.errors import SpecError
from tests.backends.recipes import recipe


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leave the process its number of threads."""
    former = torch.get_num_threads()
    yield
    torch.set_num_threads(former)


class Net(nn.Module):
    """Layers whose start values are results of matrix products, decompositions and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size) for size in (16, 33, 64, 128, 300)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
        wide = torch.randn(300, 70_000)
        self.products = nn.Parameter(wide @ wide.T)
        self.means = nn.Parameter(wide.mean(1) / wide.norm())
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(200, 200))


def start(count: int) -> dict[str, torch.Tensor]:
    torch.set_num_threads(count)
    engine = TorchEngine(LocalCollective(), torch.device("cpu"))
    model, _ = engine.prepare(Net, recipe())
    assert torch.get_num_threads() == count, "what was set is restored"
    return model.state_dict()


def test_a_model_starts_with_the_same_bits_for_every_number_of_threads() -> None:
    one, two = start(1), start(2)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_the_threads_are_restored_after_an_error_too() -> None:
    torch.set_num_threads(2)
    engine = TorchEngine(LocalCollective(), torch.device("cpu"))
    with pytest.raises(SpecError):
        engine.prepare(lambda: nn.Identity(), recipe())
    assert torch.get_num_threads() == 2
