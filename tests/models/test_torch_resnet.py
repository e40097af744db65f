"""A file of weights under torchvision's names fits the residual networks, and gives the outputs of the network it is from."""

import numpy as np
import pytest
import torch

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.models.resnet.model import ResNet18, ResNet50
from mtrain.rank.spec.assembly import given_weights
from tests.models import resnet_golden as golden
from tests.models.yolov5_small import shapes_of

TASK = Task(kind="classification", class_names=tuple("0123456789"), image_size=golden.SIDE, global_batch=2)


@pytest.mark.parametrize(("variant", "model"), [("18", ResNet18), ("50", ResNet50)])
def test_a_saved_state_dict_gives_the_same_outputs(framework, tmp_path, variant, model):
    torch.manual_seed(0)
    plain = golden.plain(variant)
    torch.save(plain.state_dict(), tmp_path / "resnet.pth")
    plugin = model()
    network = plugin.build(TASK)
    start = plugin.initial(shapes_of(framework, network), TASK, seed=0)
    result = given_weights(tmp_path / "resnet.pth", start, plugin)
    assert result.matched.keys() == start.keys()
    assert not result.left_over
    framework.load(network, result.matched)
    given = golden.batch()
    pixels = torch.from_numpy(((given["images"] / 255 - golden.MEAN) / golden.STD).transpose(0, 3, 1, 2).copy()).float()
    plain.eval()
    network.eval()
    with torch.no_grad():
        expected = plain(pixels).softmax(1).numpy()
    actual = ops.to_numpy(network({"images": framework.tensor(given["images"])})["probabilities"])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_file_for_other_classes_gives_all_but_the_classifier(framework, tmp_path):
    torch.save(golden.plain("18").state_dict(), tmp_path / "resnet.pth")
    plugin = ResNet18()
    task = Task(kind="classification", class_names=("a", "b"), image_size=64, global_batch=2)
    start = plugin.initial(shapes_of(framework, plugin.build(task)), task, seed=0)
    result = given_weights(tmp_path / "resnet.pth", start, plugin)
    assert start.keys() - result.matched.keys() == {"fc.weight", "fc.bias"}
