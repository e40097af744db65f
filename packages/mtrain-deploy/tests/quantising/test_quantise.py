"""``mtrain quantise``: files with 8-bit layers that score like the ones they were made of, and refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the extra export is not installed")
pytest.importorskip("onnxruntime", reason="the extra export is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import onnx
from onnx import numpy_helper
from tests.serving.files import exported

from mtrain.commands import main
from mtrain.spec.resolved import Resolved
from mtrain_deploy.exported.metadata import Metadata
from mtrain_deploy.exported.model import ExportedModel, read_metadata
from mtrain_deploy.exporting.onnx_file import write_metadata
from mtrain_deploy.quantising import graph, writing
from tests.starts import starts_processes

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def mtrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mtrain", *arguments]
    return subprocess.run(line, cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that rounds from its ninth update on, and its export ``net.onnx``."""
    place = tmp_path_factory.mktemp("quantise")
    settings = ["train.updates=40", "train.epochs=null", "train.quantise.start=8", "cluster.threads=1"]
    settings += ["report.plots=false", "report.tensorboard=false"]
    for command in (
        ["train", "-c", "vit_digits", "-b", "solo", "--nproc-per-node", "1", "--name", "net", "-o", *settings],
        ["export", "--run", "runs/net", "--out", "net.onnx"],
        ["quantise", "--weights", "net.onnx", "--samples", "32", "--out", "net8.onnx"],
    ):
        done = mtrain(place, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    return place


def outputs(path: Path) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 17, (64, 8, 8, 3), dtype=np.uint8) * 15
    model = ExportedModel.open(path, threads=1)
    return next(iter(model.outputs({model.metadata.inputs[0].key: images}).values()))


def test_the_result_is_small_close_and_says_what_it_is(folder: Path) -> None:
    metadata, quantised = read_metadata(folder / "net.onnx"), read_metadata(folder / "net8.onnx")
    assert quantised == metadata.model_copy(update={"precision": "int8"})
    assert (folder / "net8.onnx").stat().st_size < 0.4 * (folder / "net.onnx").stat().st_size
    exact, rounded = outputs(folder / "net.onnx"), outputs(folder / "net8.onnx")
    assert 0 < np.abs(rounded - exact).max() < 0.2


def test_layers_read_their_inputs_with_the_ranges_of_training(folder: Path) -> None:
    ranges = read_metadata(folder / "net.onnx").ranges
    made = onnx.load(str(folder / "net8.onnx")).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.initializer}
    scales = {node.input[0]: constants[node.input[1]] for node in made.node if node.op_type == "QuantizeLinear"}
    read = graph.trained_tensors(onnx.load(str(folder / "net.onnx")).graph, ranges)
    checked = [name for name in read if name in scales]
    assert len(checked) >= 10
    for name in checked:
        smallest, largest = read[name]
        assert scales[name] == np.float32(np.float32(largest) - np.float32(smallest)) / np.float32(255)


def test_a_full_disk_costs_no_file_that_was_to_be_replaced(folder: Path, monkeypatch, capsys) -> None:
    def half(model, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(folder)
    shutil.copy("net8.onnx", "good.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(onnx, "save", half)
        assert main(["quantise", "--weights", "net.onnx", "--samples", "8", "--out", "good.onnx", "--force"]) == 2
    assert "good.onnx: cannot be written: No space left on device" in capsys.readouterr().err
    assert Path("good.onnx").read_bytes() == Path("net8.onnx").read_bytes()
    assert not list(folder.glob(".good*"))


def test_a_file_that_cannot_be_written_leaves_the_one_that_it_was_to_replace(tmp_path: Path, monkeypatch) -> None:
    save = onnx.save

    def half(model, path: str, **settings) -> None:
        if model.producer_name != "mtrain":  # the quantiser's own files
            return save(model, path, **settings)
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    source, good = exported(tmp_path / "net.onnx", "classification", rounds=1), tmp_path / "good.onnx"
    good.write_bytes(b"good")
    feeds = [{"images": np.zeros((1, 64, 64, 3), np.uint8)}]
    metadata = Metadata.model_validate_json(onnx.load(str(source)).metadata_props[0].value)
    monkeypatch.setattr(onnx, "save", half)
    with pytest.raises(OSError, match="No space left on device"):
        writing.write_quantised(source, metadata, feeds, method="minmax", out=good, folder=tmp_path)
    assert good.read_bytes() == b"good"
    assert not list(tmp_path.glob(".good*"))


def test_code_that_a_strangers_file_names_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("open('was_run', 'w').close()\nclass Data: pass\n")
    content = onnx.load(str(folder / "net.onnx"))
    metadata = read_metadata(folder / "net.onnx")
    data = {**metadata.spec["data"], "format": "./evil.py:Data"}
    write_metadata(content, metadata.model_copy(update={"spec": {**metadata.spec, "data": data}}))
    onnx.save(content, str(folder / "evil.onnx"))
    done = mtrain(folder, "quantise", "--weights", "evil.onnx", "--samples", "2")
    assert (done.returncode, (folder / "was_run").exists()) == (2, False)
    assert "evil.onnx: its spec names code of a user's own, ./evil.py:Data, which is not run from a file" in done.stderr


def test_the_last_layer_stays_in_float(folder: Path) -> None:
    content = onnx.load(str(folder / "net.onnx")).graph
    floats = graph.left_in_float(content)
    assert [layer.name for layer in graph.layers(content) if layer.node in floats] == ["head"]
    made = onnx.load(str(folder / "net8.onnx")).graph
    assert any(tensor.name == "network.head.weight" and tensor.data_type == 1 for tensor in made.initializer)


def test_a_merged_layer_has_the_range_that_its_parts_share() -> None:
    ranges = {"a.conv1.conv": (0.0, 2.0), "a.conv2.conv": (0.0, 2.0), "b.x": (0.0, 1.0), "b.y": (0.0, 3.0)}
    found = [graph._range_of(name, ranges) for name in ("a.conv", "a.conv1.conv", "b.conv", "c")]
    assert found == [(0.0, 2.0), (0.0, 2.0), None, None]


@pytest.mark.parametrize(("smallest", "largest"), [(-1.0, 3.0), (0.0, 2.0), (-5.0, 0.0), (-0.3, 0.2)])
def test_the_integers_of_an_input_span_the_range_of_training(smallest: float, largest: float) -> None:
    """Dequantised by hand, ``(integer - zero point) * scale``; 0 is exact, so that padding adds nothing."""
    ((name, (settings,)),) = graph.overrides({"x": (smallest, largest)})
    scale, zero_point = float(settings["scale"]), int(settings["zero_point"])
    assert (name, settings["zero_point"].dtype, 0 <= zero_point <= 255) == ("x", np.uint8, True)
    ends = [(integer - zero_point) * scale for integer in (0, 255)]
    assert ends == pytest.approx([smallest, largest], abs=0.51 * scale)


def test_a_run_is_exported_first(folder: Path) -> None:
    done = mtrain(folder, "quantise", "--run", "runs/net", "--samples", "8", "-o", "run8.onnx")
    assert done.returncode == 0, done.stderr
    assert "layers: 17 with 8 bits, 1 last ones in float" in done.stdout
    assert read_metadata(folder / "run8.onnx").precision == "int8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "absent.onnx"], "absent.onnx: No such file or directory"),
        (["--weights", "text.onnx"], "text.onnx: cannot be loaded as an ONNX file"),
        (["--weights", "net8.onnx", "-o", "x.onnx"], "net8.onnx: is quantised already"),
        (["--weights", "net.onnx", "-o", "net8.onnx"], "net8.onnx: exists already"),
        (["--weights", "net.onnx", "-o", "x.int8"], "-o x.int8: quantise writes .onnx"),
        (["--weights", "net.onnx", "-o", "absent/x.onnx"], "the folder absent does not exist"),
        (["--weights", "net.onnx", "--run", "runs/net"], "are both given; keep one"),
        (["--weights", "net.onnx", "-c", "digits", "-o", "x.onnx"], "is a data set for detection"),
        (["--run", "runs/absent"], "no such run folder: runs/absent"),
        (["--weights", "net.onnx", "--samples", "0"], "--samples"),
        (["--weights", "net.onnx", "--method", "entropy"], "--method"),
    ],
)
def test_errors_of_users_are_one_sentence(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "text.onnx").write_text("no graph\n")
    before = sorted(folder.iterdir())
    monkeypatch.chdir(folder)
    code = main(["quantise", *arguments])
    error = capsys.readouterr().err
    assert (code, message in error) == (2, True), error
    assert "Traceback" not in error
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_detection_loses_less_than_a_point_of_average_precision(tmp_path: Path) -> None:
    settings = ["train.epochs=12", "evaluate.every_epochs=12", "cluster.threads=1"]
    settings += ["report.plots=false", "report.tensorboard=false"]
    for command in (
        ["train", "-c", "digits", "-b", "solo", "--nproc-per-node", "1", "--name", "net", "-o", *settings],
        ["export", "--run", "runs/net", "--out", "net.onnx"],
        ["quantise", "--weights", "net.onnx", "-o", "net8.onnx"],
    ):
        line = [sys.executable, "-m", "mtrain", *command]
        subprocess.run(line, cwd=tmp_path, env=ENVIRON, check=True, capture_output=True, timeout=3000)
    precisions = [precision_of(tmp_path / name) for name in ("net.onnx", "net8.onnx")]
    assert precisions[0] > 0.3
    assert precisions[1] > precisions[0] - 0.01
    shutil.rmtree(tmp_path / "runs")


def precision_of(path: Path) -> float:
    from mtrain_deploy.exported.data import evaluation_data, micro_batches

    model = ExportedModel.open(path, threads=1)
    data = evaluation_data(Resolved.of(model.spec()), model.metadata)
    evaluator = data.evaluator()
    for batch in micro_batches(data, size=8):
        evaluator.add(batch, model.predictions(batch))
    return float(evaluator.result([evaluator.partial()])["AP"])
