"""YOLOv5 under torch alone: half precision and the layout of memory."""

import pytest
import torch

from mtrain.core import ops
from tests.models.yolov5_small import batch_of, ready_network


def test_the_loss_of_a_half_precision_forward_is_float32(framework):
    network = ready_network(framework)
    with torch.autocast("cpu", torch.bfloat16):
        losses = network(batch_of(framework))
        network.eval()
        decoded = network(batch_of(framework))["decoded"]
    assert {ops.dtype(x) for x in losses.values()} == {"float32"}
    assert ops.dtype(decoded) == "float32"


def test_images_reach_the_first_layer_in_channels_last_memory(framework):
    network = ready_network(framework)
    calls = []
    network.model[0].register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
    network(batch_of(framework))
    assert calls[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["total", "box", "obj", "cls"])
def test_a_part_of_the_loss_is_no_way_to_the_parameters(framework, name):
    assert ready_network(framework)(batch_of(framework))[name].requires_grad == (name == "total")
