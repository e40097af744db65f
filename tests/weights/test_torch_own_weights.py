"""Weights of scripts and of users' own models leave under the names of their ``state_dict``, to the bit."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mtrain.commands import main
from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, State


class Net(nn.Module):
    """A module with what users' modules have: tied weights, BatchNorm, integer and scalar buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.tied = nn.Linear(16, 2)
        self.tied.weight = self.body[3].weight
        self.register_buffer("calls", torch.tensor(7, dtype=torch.int64))

    def forward(self, rows):
        return self.body(rows) + self.calls


def arrays(net: nn.Module) -> dict:
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


@pytest.fixture(params=["script", "model"])
def run(request, tmp_path, monkeypatch):
    """A run folder ``runs/own`` whose averaged weights are those of the module that is returned."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    first, averaged = Net(), Net()
    averaged.body(torch.randn(32, 8))  # its statistics move
    ema = {name: array for name, array in arrays(averaged).items() if name != "calls"}
    spec = {"model": {"name": "/srv/nets.py:Net"}} if request.param == "model" else {}
    extra = {"script": "abc"} if request.param == "script" else {}
    folder = tmp_path / "runs/own/checkpoints"
    folder.mkdir(parents=True)
    state = State(weights=arrays(first), ema=ema, moments={}, counters={})
    write(folder / "step-00000004", Saved(state=state, progress=Progress(update=4), spec=spec, meta={"extra": extra}))
    return averaged


@pytest.mark.parametrize("target", ["x.pt", "x.safetensors"])
def test_the_plain_module_loads_the_file_and_computes_the_same_bits(run, target, capsys):
    assert main(["weights", "export", "runs/own", "--to", target]) == 0, capsys.readouterr().err
    state = torch.load(target, weights_only=True) if target.endswith(".pt") else load_file(target)
    plain = Net()
    plain.load_state_dict(state, strict=True)
    rows = torch.randn(5, 8)
    assert torch.equal(plain.eval()(rows), run.eval()(rows))
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        name: tensor.dtype for name, tensor in run.state_dict().items()
    }


@pytest.mark.parametrize("command", [["export"], ["predict", "image.png"]])
def test_what_needs_the_network_says_how_the_weights_leave(run, command, capsys):
    from PIL import Image

    Image.new("RGB", (8, 8)).save("image.png")
    assert main([*command, "--run", "runs/own"]) == 2
    message = capsys.readouterr().err
    assert "mtrain weights export runs/own --to own.pt" in message
    assert "yolov5n" not in message


def test_other_commands_on_a_run_of_own_code_say_so_too(run, request, capsys):
    commands = [["prune", "--run", "runs/own", "--target", "0.5", "--out", "small"]]
    if "script" in request.node.name:  # a model of one's own is scored by `mtrain evaluate -c own.yml`
        commands.append(["evaluate", "--run", "runs/own"])
    for command in commands:
        assert main(command) == 2
        assert "mtrain weights export runs/own --to own.pt" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--deploy"], ["--model", "yolov5n"]])
def test_flags_for_described_models_are_refused(run, flag, capsys):
    assert main(["weights", "export", "runs/own", "--to", "x.pt", *flag]) == 2
    assert flag[0] in capsys.readouterr().err
