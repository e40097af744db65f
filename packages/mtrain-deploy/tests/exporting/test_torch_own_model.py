"""ONNX files of users' own models: ONNX Runtime gives what the module's ``predict`` gives, for any size of batch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from mtrain.commands import main
from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, State
from mtrain.errors import SpecError
from mtrain.spec import config
from mtrain_deploy.exported.model import ExportedModel
from mtrain_deploy.exporting.onnx_file import finish
from mtrain_deploy.exporting.own_model import example_inputs
from mtrain_deploy.exporting.request import ExportRequest
from mtrain_deploy.exporting.torch_program import _forget_source, _write_onnx

CODE = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, token="hunter2"):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
        )
        self.side = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)

    def scores(self, image, facts):
        return self.head(self.body(image).flatten(1) + self.side(facts))

    def forward(self, batch):
        return nn.functional.cross_entropy(self.scores(batch["image"], batch["more"][0]), batch["label"])

    def predict(self, batch):
        scores = self.scores(batch["image"], batch["more"][0])
        return {"scores": scores, "best": scores.argmax(1)}, batch["label"]

class Plain(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

class Images:
    def __init__(self, split="train", root_dir="/srv/acme/cells"):
        self.split = split

    def __len__(self):
        return 3

    def __getitem__(self, index):
        image = np.full((1, 6, 5), index, np.float32)
        return {"image": image, "more": (np.ones(3, np.float32), index), "label": index % 2}

class Pairs:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.full(3, index, np.float32), index % 2
"""
SPEC = """
model: {{name: ./nets.py:{model}, framework: {framework}}}
data: {{format: ./nets.py:{data}}}
train: {{updates: 4, batch_size: 2}}
"""
CANARIES = ("hunter2", "/srv", "acme", "cells", "root_dir", "token")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(CODE)
    return tmp_path


def run_of(folder: Path, module: nn.Module, *, name: str = "own", script: bool = False) -> None:
    """Write the run folder of a finished job whose weights are those of ``module``."""
    arrays = {key: tensor.detach().numpy().copy() for key, tensor in module.state_dict().items()}
    checkpoints = folder / "runs" / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    spec = {} if script else {"model": {"name": f"/srv/acme/nets.py:{type(module).__name__}"}}
    state = State(weights=arrays, ema={}, moments={}, counters={})
    saved = Saved(
        state=state, progress=Progress(update=4), spec=spec, meta={"extra": {"script": "abc"} if script else {}}
    )
    write(checkpoints / "step-00000004", saved)


def spec(folder: Path, *, model: str = "Net", data: str = "Images", framework: str = "torch") -> str:
    (folder / "own.yml").write_text(SPEC.format(model=model, data=data, framework=framework))
    return "own.yml"


def classes() -> dict:
    names: dict = {}
    exec(CODE, names)
    return names


@pytest.mark.smoke
@pytest.mark.job
def test_onnxruntime_computes_what_predict_returns_for_every_size_of_batch(folder, capsys):
    torch.manual_seed(0)
    net = classes()["Net"]()
    net.scores(torch.randn(32, 1, 6, 5), torch.randn(32, 3))  # the statistics of BatchNorm move
    run_of(folder, net)
    assert main(["export", "--run", "runs/own", "-c", spec(folder)]) == 0, capsys.readouterr().err
    session = onnxruntime.InferenceSession("own.onnx")
    shapes = {given.name: (given.shape, given.type) for given in session.get_inputs()}
    assert shapes == {"image": (["batch", 1, 6, 5], "tensor(float)"), "more.0": (["batch", 3], "tensor(float)")}
    assert [output.name for output in session.get_outputs()] == ["scores", "best"]
    for size in (1, 2, 5):
        image, facts = torch.randn(size, 1, 6, 5), torch.randn(size, 3)
        batch = {"image": image, "more": (facts, None), "label": None}
        expected, _ = net.eval().predict(batch)
        feed = {"image": image.numpy(), "more.0": facts.numpy()}
        scores, best = session.run(None, feed)
        np.testing.assert_allclose(scores, expected["scores"].detach(), rtol=1e-5, atol=1e-6)
        assert best.tolist() == expected["best"].tolist()
        opened = ExportedModel.open("own.onnx").outputs(feed)
        np.testing.assert_array_equal(opened["scores"], scores)
    content = Path("own.onnx").read_bytes().decode("latin-1")
    assert [word for word in (*CANARIES, str(folder), str(Path.cwd())) if word in content] == []
    told = json.loads(session.get_modelmeta().custom_metadata_map["mtrain"])
    assert (told["model"], told["spec"], told["options"]) == ("nets.py:Net", {}, {})


def test_arrays_of_one_row_for_each_sample_are_those_of_any_size_of_batch(folder):
    data = SimpleNamespace(dataset=classes()["Images"]())
    given = example_inputs(
        config.load(spec(folder), environ={}).spec, SimpleNamespace(train=data, val=data), batch=None
    )
    assert {each.name: (each.shape, each.batched) for each in given} == {
        "image": ((1, 6, 5), True),
        "more.0": ((3,), True),
        "more.1": ((), True),
        "label": ((), True),
    }


def test_the_file_of_an_own_model_holds_nothing_of_its_spec(folder):
    loaded = config.load(spec(folder), environ={})
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ("batch", 3))
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ("batch", 3))
    graph = helper.make_graph([helper.make_node("Identity", ["image"], ["scores"])], "own", [image], [scores])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), "own.onnx")
    facts = {"kind": "own", "options": {}, "class_names": [], "category_ids": [], "image_size": 0, "details": {}}
    facts |= {"size_step": None, "ranges": {}, "weights_sha256": "", "outputs": ["scores"]}
    facts["inputs"] = [{"name": "image", "key": "image", "layout": "", "dtype": "float32", "axes": {"0": "batch"}}]
    told = finish(Path("own.onnx"), request=ExportRequest(), facts=facts, loaded=loaded, weights=Path("w.safetensors"))
    assert (told.model, told.spec, told.options) == ("nets.py:Net", {}, {})


def test_a_traced_program_carries_no_lines_of_source():
    inner = torch.fx.symbolic_trace(nn.ReLU())
    outer = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    outer.inner = inner
    for module in (inner, outer):
        for node in module.graph.nodes:
            node.meta["stack_trace"] = 'File "/srv/acme/nets.py", line 1'
    _forget_source(SimpleNamespace(graph_module=outer))
    assert not [node for module in (inner, outer) for node in module.graph.nodes if "stack_trace" in node.meta]


@pytest.mark.job
def test_a_program_of_torch_export_takes_what_predictions_read_and_returns_them(folder, capsys):
    torch.manual_seed(0)
    net = classes()["Net"]()
    net.scores(torch.randn(32, 1, 6, 5), torch.randn(32, 3))
    run_of(folder, net)
    assert main(["export", "--run", "runs/own", "-c", spec(folder), "--format", "torch"]) == 0, capsys.readouterr().err
    told = {"mtrain.json": ""}
    program = torch.export.load("own.pt2", extra_files=told).module()
    assert json.loads(told["mtrain.json"]) == {"inputs": ["image", "more.0"], "outputs": ["scores", "best"]}
    for size in (2, 5):
        image, facts = torch.randn(size, 1, 6, 5), torch.randn(size, 3)
        expected, _ = net.eval().predict({"image": image, "more": (facts, None), "label": None})
        scores, best = program(image, facts)
        torch.testing.assert_close(scores, expected["scores"])
        assert best.tolist() == expected["best"].tolist()


@pytest.mark.slow
def test_the_module_of_a_script_is_called_with_the_first_part_of_a_batch(folder, capsys):
    net = classes()["Plain"]()
    run_of(folder, net, script=True)
    assert main(["export", "--run", "runs/own", "-c", spec(folder, model="Plain", data="Pairs"), "--batch", "3"]) == 0
    session = onnxruntime.InferenceSession("own.onnx")
    rows = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    assert [given.shape for given in session.get_inputs()] == [[3, 3]]
    (found,) = session.run(None, {"input_0": rows})
    np.testing.assert_allclose(found, net(torch.from_numpy(rows)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_whose_forward_is_the_loss_needs_predict(folder, capsys):
    run_of(folder, classes()["Plain"]())
    assert main(["export", "--run", "runs/own", "-c", spec(folder, model="Plain", data="Pairs")]) == 2
    assert "Plain has no method predict(batch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "paddle"], "--format paddle"),
        (["--format", "safetensors"], "--format safetensors"),
        (["--precision", "fp16"], "--precision fp16"),
        (["--form", "raw"], "--form raw"),
    ],
)
def test_what_an_own_model_cannot_be_written_as_is_refused_at_once(folder, words, reason, capsys):
    run_of(folder, classes()["Net"]())
    assert main(["export", "--run", "runs/own", "-c", spec(folder), *words]) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert "leave the flag out" in message


def test_an_own_model_of_paddle_is_written_by_paddle_alone(folder, capsys):
    run_of(folder, classes()["Net"]())
    words = ["-c", spec(folder, framework="paddle"), "-o", "backend.name=fleet"]
    assert main(["export", "--run", "runs/own", *words]) == 2
    assert "is a model of Paddle, which is exported with --format paddle" in capsys.readouterr().err
    assert main(["export", "--run", "runs/own", *words, "--format", "paddle", "--layout", "nchw"]) == 2
    assert "an own model of Paddle is exported as a program of Paddle" in capsys.readouterr().err


def test_without_the_spec_that_names_the_code_nothing_is_built(folder, capsys):
    run_of(folder, classes()["Net"]())
    assert main(["export", "--run", "runs/own"]) == 2
    message = capsys.readouterr().err
    assert "-c" in message
    assert "mtrain weights export runs/own --to own.pt" in message


def test_a_torch_that_cannot_write_a_network_as_onnx_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export(*_: Any, **__: Any) -> None:
        raise torch.onnx.OnnxExporterError("Failed to convert the exported program to an ONNX model. This is step 3/3.")

    monkeypatch.setattr(torch.onnx, "export", export)
    program: Any = SimpleNamespace(inputs=[], opset=None, path=tmp_path / "x.onnx")
    with pytest.raises(
        SpecError, match=r"torch 2\.\d+.* cannot write .* \(Failed to convert .* ONNX model\); use a newer torch"
    ):
        _write_onnx(None, program, names=[])
