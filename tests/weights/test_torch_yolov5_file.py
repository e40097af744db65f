"""Checkpoints for YOLOv5's own programs, read by torch into classes of the same names that compute what these compute."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from mtrain.commands import main
from mtrain.core import ops
from mtrain.weights.reading import read
from mtrain.weights.writing import write
from mtrain.weights.yolov5_file import pt_bytes
from tests.models.yolov5_small import ready_network
from tests.weights import golden


class Conv(nn.Module):
    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPPF(nn.Module):
    def forward(self, x):
        maps = [self.cv1(x)]
        maps += [self.m(maps[-1])]
        maps += [self.m(maps[-1])]
        return self.cv2(torch.cat((*maps, self.m(maps[-1])), 1))


class Concat(nn.Module):
    def forward(self, x):
        return torch.cat(x, self.d)


class Detect(nn.Module):
    def forward(self, x):
        return [conv(level) for conv, level in zip(self.m, x, strict=True)]


class DetectionModel(nn.Module):
    def forward(self, x):
        outputs = []
        for layer in self.model:
            sources = [layer.f] if isinstance(layer.f, int) else layer.f
            assert all(source == -1 or source in self.save for source in sources)
            inputs = [x if source == -1 else outputs[source] for source in sources]
            x = layer(inputs if isinstance(layer.f, list) else inputs[0])
            outputs.append(x)
        return x


@pytest.fixture
def load(monkeypatch):
    """Load a file by torch, with the classes above in the modules where YOLOv5 has its own."""
    modules = {"models.yolo": (Detect, DetectionModel), "models.common": (Conv, Bottleneck, C3, SPPF, Concat)}
    for name, classes in {"models": (), **modules}.items():
        module = ModuleType(name)
        vars(module).update({one.__name__: one for one in classes})
        monkeypatch.setitem(sys.modules, name, module)
    return lambda path: torch.load(path, weights_only=False)


def test_yolov5s_module_has_its_names_and_computes_what_the_network_here_computes(framework, tmp_path, load):
    network = ready_network(framework)
    network.eval()
    state = {name: array.numpy(force=True).copy() for name, array in framework.state(network).items()}
    rng = np.random.default_rng(0)
    for name, array in state.items():
        if name.endswith("running_mean"):
            array[:] = rng.normal(0, 0.1, array.shape)
    framework.load(network, state)
    write(tmp_path / "best.pt", state, make=lambda arrays: pt_bytes("yolov5n", arrays, class_names=["a", "b", "c"]))
    checkpoint = load(tmp_path / "best.pt")
    model = checkpoint["model"].float().eval()
    assert list(model.state_dict()) == list(golden.yolov5("n"))
    images = rng.uniform(0, 1, (2, 3, 64, 64)).astype(np.float32)
    with torch.no_grad():
        expected, actual = network.heads(torch.from_numpy(images)), model(torch.from_numpy(images))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-4, atol=1e-5)
    assert model.names == {0: "a", 1: "b", 2: "c"}
    assert (model.nc, model.stride.tolist(), checkpoint["epoch"], checkpoint["ema"]) == (3, [8, 16, 32], -1, None)
    assert model.yaml["nc"] == 3
    assert model.save == [4, 6, 10, 14, 17, 20, 23]
    head = model.model[-1]
    assert (head.nc, head.no, head.nl, head.na) == (3, 8, 3, 3)
    assert np.shape(model.yaml["anchors"]) == (3, 6)
    np.testing.assert_allclose(model.yaml["anchors"][0][:2], state["model.24.anchors"][0, 0] * 8)
    assert (len(model.yaml["backbone"]), len(model.yaml["head"])) == (10, 15)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert ops.shape(model.model[-1].grid[0]) == (1,)


@pytest.mark.parametrize("variant", ["n", "m"])
def test_what_is_written_is_read_here_again_bit_for_bit_with_its_classes(tmp_path, capsys, variant):
    write(tmp_path / "w.safetensors", golden.yolov5(variant))
    target = tmp_path / "best.pt"
    arguments = ["weights", "export", str(tmp_path / "w.safetensors"), "--model", f"yolov5{variant}"]
    assert main([*arguments, "--format", "yolov5", "--to", str(target)]) == 0
    again = read(target)
    golden.equal(again.arrays, golden.yolov5(variant))
    assert list(again.labels["class_names"]) == [str(i) for i in range(80)]


def test_other_models_endings_and_parts_are_refused(tmp_path, capsys):
    write(tmp_path / "p.pdparams", golden.ppyoloe("s"))
    write(tmp_path / "part.safetensors", {n: a for n, a in golden.yolov5("n").items() if "model.24" not in n})
    write(tmp_path / "n.safetensors", golden.yolov5("n"))
    for file, model, target, message in (
        ("p.pdparams", "ppyoloe_s", "w.pt", "the weights are of ppyoloe_s"),
        ("part.safetensors", "yolov5n", "w.pt", "model.24.anchors is not in"),
        ("n.safetensors", "yolov5n", "w.pth", "expected the ending .pt"),
    ):
        arguments = [str(tmp_path / file), "--model", model, "--format", "yolov5", "--to", str(tmp_path / target)]
        assert main(["weights", "export", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("error: --format yolov5: ")
        assert message in error
        assert not (tmp_path / target).exists()
