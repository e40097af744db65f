"""What a script may load into a model of which each rank trains a part, and what of an optimizer's state goes with a part."""

import copy

import pytest
import torch
from torch import nn

from mtrain.backends._torch.scripts.native_copies import ParameterPiece
from mtrain.backends._torch.sharded import whole_states
from mtrain.errors import SpecError


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[0].requires_grad_(False)
    whole_states.refuse(made, lambda weight, value: weight.requires_grad)
    return made


def test_whole_arrays_are_refused_where_a_part_is_trained():
    trained = model()
    with pytest.raises(SpecError, match=r"load_state_dict: the whole array 1\.weight given"):
        trained.load_state_dict(trained.state_dict())


def test_what_is_frozen_may_be_loaded():
    trained = model()
    trained[0].load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert trained[0].weight.eq(1).all()


def test_a_copy_such_as_a_target_network_may_be_loaded():
    trained = model()
    target = copy.deepcopy(trained)
    with torch.no_grad():
        trained[1].weight.fill_(3)
    target.load_state_dict(trained.state_dict())
    assert target[1].weight.eq(3).all()


def test_a_state_that_an_optimizer_makes_at_once_follows_its_part_to_the_device():
    piece = ParameterPiece(torch.empty(2, device="meta"), 1)
    assert piece.of(torch.arange(4.0), torch.Size([4])).device.type == "meta"
