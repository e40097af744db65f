"""The models `convnext_*`: sizes, names, the layer written here, stochastic depth; and mtrain's own checks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtrain_convnext.model import ConvNeXt, ConvNeXtAtto, ConvNeXtTiny

from mtrain.backends.solo import Solo
from mtrain.core import binding
from mtrain.core.interfaces import Task
from mtrain.errors import SpecError

IMAGENET = Task(kind="classification", class_names=[str(i) for i in range(1000)], image_size=224, global_batch=8)
SMALL = Task(kind="classification", class_names=["a", "b", "c"], image_size=32, global_batch=4)


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    """Torch, bound as in a rank of a job; the network can be imported from here on."""
    solo = Solo(Solo.Options(framework="torch", device="cpu"))
    binding.bind(solo.nn, solo.ops)
    return pytest.importorskip("torch")


def built(plugin: ConvNeXt, task: Task, torch: Any) -> Any:
    """Return a network with start values."""
    network = plugin.build(task, None)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    values = plugin.initial(shapes, task, seed=1)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return network


@pytest.mark.parametrize(("model", "count"), [(ConvNeXtAtto, 3_695_520), (ConvNeXtTiny, 28_589_128)])
def test_a_network_has_the_size_of_its_paper(model: type[ConvNeXt], count: int, torch: Any) -> None:
    network = model(model.Options()).build(IMAGENET, None)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_weights_have_the_names_of_the_first_release(torch: Any) -> None:
    names = set(built(ConvNeXtAtto(ConvNeXtAtto.Options()), SMALL, torch).state_dict())
    assert {"downsample_layers.0.0.weight", "downsample_layers.0.1.bias", "downsample_layers.3.0.weight"} <= names
    assert {"stages.2.5.dwconv.weight", "stages.2.5.pwconv1.bias", "stages.2.5.gamma", "norm.weight"} <= names


def test_channels_are_normalised_as_layer_norm_does(torch: Any) -> None:
    from mtrain_convnext.network import ChannelNorm

    layer, x = ChannelNorm(6), torch.randn(2, 6, 3, 5)
    expected = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (6,), eps=1e-6).permute(0, 3, 1, 2)
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_stochastic_depth_drops_whole_branches_and_keeps_their_mean(torch: Any) -> None:
    from mtrain_convnext.network import Block

    block = Block(4, drop_path=0.5, name="block1").train()
    with torch.no_grad():
        block.gamma.fill_(1.0)
    x = torch.randn(1, 4, 8, 8).expand(400, -1, -1, -1)
    branch = (block(x, torch.arange(400, dtype=torch.int32) * 7919) - x).flatten(1)
    whole = block.eval()(x, None)[0] - x[0]
    dropped = branch.abs().sum(1) == 0
    assert 120 < int(dropped.sum()) < 280
    assert torch.allclose(branch[~dropped], 2 * whole.flatten(), atol=1e-5)


def test_probabilities_are_returned_in_evaluation_and_a_loss_in_training(torch: Any) -> None:
    network = built(ConvNeXtAtto(ConvNeXtAtto.Options()), SMALL, torch)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    batch = {"images": torch.from_numpy(images), "labels": torch.tensor([0, 1, 2, 0])}
    probabilities = network.eval()(batch)["probabilities"]
    assert torch.allclose(probabilities.sum(1), torch.ones(4))
    assert network.train()(batch)["total"].item() == pytest.approx(np.log(3), abs=0.1)


def test_images_that_are_too_small_are_refused_with_the_key() -> None:
    task = Task(kind="classification", class_names=["a", "b"], image_size=16, global_batch=4)
    with pytest.raises(SpecError, match=r"data\.image_size: 16 given, and ConvNeXt needs 32 or more"):
        ConvNeXtTiny(ConvNeXtTiny.Options()).prepare_task(task, {})


def test_it_passes_the_checks_of_mtrain(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mtrain", "plugins", "test", "convnext_atto", "--kind", "models"]
    # With the published start of the layer scale, 1e-6, blocks would hardly matter in so short a job.
    options = ["-o", "data.image_size=32", "model.options.drop_path=0.2", "model.options.layer_scale=0.1"]
    result = subprocess.run([*line, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
