"""What a model inside DDP answers to a name that is the user's module's, and not its own."""

import pytest
import torch

from mtrain.backends._torch.ddp_engine import DeterministicBucketsDDP


class Recurrent(torch.nn.Linear):
    """A module with a method and an attribute of its own."""

    hidden_size = 7

    def init_hidden(self) -> torch.Tensor:
        return torch.zeros(7)


@pytest.fixture
def wrapped() -> DeterministicBucketsDDP:
    """A module inside DDP, without the process group that only an exchange needs."""
    model = DeterministicBucketsDDP.__new__(DeterministicBucketsDDP)
    torch.nn.Module.__init__(model)
    model.module = Recurrent(2, 2)
    return model


def test_a_method_of_the_users_module_is_said_to_be_that_of_model_module(wrapped: DeterministicBucketsDDP) -> None:
    for name in ("init_hidden", "hidden_size", "weight"):
        with pytest.raises(
            AttributeError, match=rf"{name}: with ddp, the model is your Recurrent .*: model\.module\.{name}$"
        ):
            getattr(wrapped, name)
    assert wrapped.module.init_hidden().shape == (7,)


def test_a_name_that_nobody_has_is_answered_as_ever(wrapped: DeterministicBucketsDDP) -> None:
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        _ = wrapped.nothing
    assert not hasattr(DeterministicBucketsDDP.__new__(DeterministicBucketsDDP), "anything"), "before it is made"
