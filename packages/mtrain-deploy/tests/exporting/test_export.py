"""``mtrain export``, and ``evaluate`` and ``predict`` with the ONNX file, through the real command line."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

import mtrain as package
from mtrain.commands import main
from mtrain.errors import CheckpointError, DataError, SpecError, UsageError
from mtrain.spec.resolved import Resolved
from tests import warm
from tests.starts import starts_processes

pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("torch", reason="torch writes the graph")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
WITHOUT_FRAMEWORK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "paddle", "onnx", "onnxscript"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
from mtrain.commands import main
code = main(sys.argv[1:])
assert not {"torch", "paddle"} & set(sys.modules)
sys.exit(code)
"""


def mtrain(
    *arguments: object, cwd: Path, program: tuple[str, ...] = ("-m", "mtrain")
) -> subprocess.CompletedProcess[str]:
    words = list(map(str, arguments))
    if program == ("-m", "mtrain"):
        return warm.mtrain(*words, cwd=cwd, env=ENVIRONMENT)
    return subprocess.run(
        [sys.executable, *program, *words], cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )


def done(*arguments: object, cwd: Path, program: tuple[str, ...] = ("-m", "mtrain")) -> str:
    process = mtrain(*arguments, cwd=cwd, program=program)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
@starts_processes
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/small``, ten epochs on 16 digits at 64 px, and the file ``small.onnx`` of it."""
    folder = tmp_path_factory.mktemp("exported")
    done("data", "make", "digits", "digits", "--train", "16", "--val", "8", "--size", "64", cwd=folder)
    values = ["data.format=coco", "data.root=digits", "data.image_size=64", "train.batch_size=4", "data.workers=1"]
    values += ["evaluate.every_epochs=null", "report.plots=false", "data.augment.mosaic=0"]
    values += [f"data.cache_dir={folder}/hunter2", f"checkpoint.copy_to=file://{folder}/hunter3"]
    done("-c", "digits", "--backend", "solo", "--name", "small", "--epochs", "10", "-o", *values, cwd=folder)
    printed = done("export", "--run", "runs/small", cwd=folder)
    assert printed.startswith("written: small.onnx (")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], "the work folder is gone"
    return folder


def metrics(folder: Path) -> dict[str, float]:
    read: dict[str, float] = json.loads((folder / "summary.json").read_text())["metrics"]
    return read


def test_the_file_says_what_it_takes_and_what_it_returns(exported):
    from mtrain_deploy.exported.model import read_metadata

    metadata = read_metadata(exported / "small.onnx")
    assert (metadata.kind, metadata.model, metadata.form, metadata.precision) == (
        "detection",
        "yolov5n",
        "decoded",
        "fp32",
    )
    assert metadata.class_names == tuple("0123456789")
    assert metadata.inputs[0].shape == ("batch", 64, 64, 3)
    assert metadata.outputs == {"decoded": ("batch", 252, 15)}
    assert metadata.preprocessing["resize"] == "letterbox"
    assert np.shape(metadata.details["anchors"]) == (3, 3, 2)
    assert set(metadata.spec) == {"model", "data", "evaluate"}
    assert metadata.spec["data"]["image_size"] == 64


def carried(path: Path) -> bytes:
    """Return all bytes of a file, those of a compressed archive unpacked."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


def private_words(folder: Path) -> list[bytes]:
    """Return paths of this machine, which the run's spec and the traced code have, and what else the spec names."""
    paths = (folder, Path(package.__file__).parent, sysconfig.get_path("purelib"), Path.home() / "x")
    return [*(str(path).encode() for path in paths), b"hunter2", b"hunter3", b"site-packages", b".py"]


def test_an_exported_file_names_nothing_of_the_machine_it_was_made_on(exported):
    """Neither the job's spec nor the traces of source code that torch's exporter notes reach a customer."""
    done("export", "--run", "runs/small", "--format", "torch", "--out", "customer.pt2", cwd=exported)
    done("export", "--run", "runs/small", "--format", "safetensors", "--out", "customer.safetensors", cwd=exported)
    for name in ("small.onnx", "customer.pt2", "customer.safetensors"):
        content = carried(exported / name)
        assert len(content) > 1e6
        assert [word for word in private_words(exported) if word in content] == [], name


def test_a_checkpoint_has_the_spec_without_hosts_reporters_and_copies(exported):
    checkpoint = max((exported / "runs/small/checkpoints").glob("step-*"))
    spec = json.loads((checkpoint / "state.json").read_text())["spec"]
    assert not {"cluster", "launcher", "report"} & set(spec)
    assert "hunter3" not in json.dumps(spec)
    assert spec["data"]["image_size"] == 64


def test_evaluate_without_a_framework_gives_the_metrics_of_the_checkpoint(exported):
    done("evaluate", "--run", "runs/small", cwd=exported)
    arguments = ("--weights", "small.onnx", "-o", "data.root=digits")
    printed = done("evaluate", *arguments, cwd=exported, program=("-c", WITHOUT_FRAMEWORK))
    here, there = metrics(exported / "runs/small-evaluate"), metrics(exported / "runs/small-evaluate-2")
    assert "run folder: runs/small-evaluate-2" in printed
    # Ten epochs leave scores so near to each other that rounding orders some boxes otherwise; the rows of predictions are
    # compared one by one below.
    assert there == pytest.approx(here, abs=0.02)
    assert here["AR100"] > 0, "metrics of 0 would be equal whatever the file computes"


def is_same(row, other) -> bool:
    """Return whether two rows of predictions are one but for rounding."""
    return (
        (row["file_name"], row["class"]) == (other["file_name"], other["class"])
        and abs(row["score"] - other["score"]) < 1e-4
        and np.allclose(row["bbox"], other["bbox"], atol=0.02)
    )


def test_predict_without_a_framework_finds_what_the_checkpoint_finds(exported):
    done("predict", "--run", "runs/small", "--confidence", "0.0", "--out", "a", "digits/images", cwd=exported)
    arguments = ("--weights", "small.onnx", "--confidence", "0.0", "--out", "b", "digits/images")
    printed = done("predict", *arguments, cwd=exported, program=("-c", WITHOUT_FRAMEWORK))
    assert "found:     b/predictions.json" in printed
    rows, others = (json.loads((exported / f"{name}/predictions.json").read_text()) for name in "ab")
    assert rows
    # Rounding may swap rows of almost equal scores, and the one at the limit of their number.
    best = sorted(rows, key=lambda row: -row["score"])[:50]
    strangers = [row for row in best if not any(is_same(row, other) for other in others)]
    assert strangers == []
    assert len(list((exported / "b").glob("*.jpg"))) == 24


def test_a_batch_of_any_size_and_a_wrong_one(exported):
    from mtrain_deploy.exported.model import ExportedModel

    model = ExportedModel.open(exported / "small.onnx", threads=1)
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3)).astype(np.uint8)
    whole = model.outputs({"images": images})["decoded"]
    single = [model.outputs({"images": images[i : i + 1]})["decoded"][0] for i in range(3)]
    np.testing.assert_allclose(whole, single, rtol=1e-5, atol=1e-4)
    with pytest.raises(UsageError, match=r"an array of shape \(3, 32, 64, 3\); the exported model takes"):
        model.outputs({"images": images[:, :32]})
    with pytest.raises(UsageError, match="no array 'images'"):
        model.outputs({"pixels": images})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.onnx", "missing.onnx"),
        ("folder.onnx", "is not a file"),
        ("pipe.onnx", "is not a file"),
        ("empty.onnx", "cannot be loaded as an ONNX file"),
        ("text.onnx", "cannot be loaded as an ONNX file"),
        ("cut.onnx", "cannot be loaded as an ONNX file"),
        ("foreign.onnx", "without mtrain's metadata"),
        ("newer.onnx", "use a newer mtrain"),
        ("damaged.onnx", "its metadata is damaged"),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_wrong_file_is_one_sentence(exported, tmp_path, monkeypatch, capsys, name, message, command):
    monkeypatch.chdir(tmp_path)
    make_wrong_file(exported / "small.onnx", tmp_path / name)
    images = [str(exported / "digits/images")] if command == "predict" else []
    assert main([command, "--weights", name, *images]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def make_wrong_file(good: Path, path: Path) -> None:
    import onnx

    match path.stem:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "empty":
            path.touch()
        case "text":
            path.write_text("no graph")
        case "cut":
            path.write_bytes(good.read_bytes()[:-100_000])
        case "foreign" | "newer" | "damaged":
            model = onnx.load(str(good))
            text = next(entry for entry in model.metadata_props if entry.key == "mtrain")
            if path.stem == "foreign":
                model.metadata_props.remove(text)
            else:
                text.value = (
                    json.dumps({**json.loads(text.value), "format": 99}) if path.stem == "newer" else "[" * 100_000
                )
            onnx.save(model, str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "-c", "vit_digits", "--weights", "small.onnx"],
            "is of yolov5n, but the spec has model.name: vit",
        ),
        (["evaluate", "--weights", "small.onnx", "-o", "data.image_size=96"], "takes images of 64 px"),
        (
            ["evaluate", "--weights", "small.onnx", "-o", "data.format=digits_masks"],
            "is a data set for segmentation, but",
        ),
        (["evaluate", "--weights", "small.onnx", "--run", "runs/small"], "are both given"),
        (["export", "--run", "nowhere"], "no such run folder: nowhere"),
        (["export", "--run", "runs/small"], "small.onnx exists already; give --force"),
        (["export", "--run", "runs/small", "-o", "x.txt"], "writes .onnx"),
        (["export", "--run", "runs/small", "-o", "none/x.onnx"], "the folder none does not exist"),
        (["export", "--weights", "small.onnx", "-o", "y.onnx"], "is an exported model already"),
        (["export", "--run", "runs/small", "--form", "nms", "--format", "torch"], "--form nms: is for --format onnx"),
        (["export", "--run", "runs/small", "--confidence", "0.5"], "--confidence: is for --form nms"),
    ],
)
def test_a_wrong_request_is_one_sentence(exported, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(exported)
    before = sorted(path.name for path in (exported / "runs").iterdir())
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in (exported / "runs").iterdir()) == before, "nothing was started"


def test_other_classes_in_another_order_are_refused(exported):
    from mtrain_deploy.exported.data import evaluation_data
    from mtrain_deploy.exported.model import ExportedModel

    model = ExportedModel.open(exported / "small.onnx", threads=1)
    other = model.metadata.model_copy(update={"class_names": tuple("9876543210")})
    spec = model.spec().model_copy(deep=True)
    spec.data.__dict__["root"] = str(exported / "digits")
    with pytest.raises(DataError, match="those of the exported model are 9, 8"):
        evaluation_data(Resolved.of(spec), other).task()


def test_code_that_only_the_file_names_is_not_run(exported):
    from mtrain.jobs.exported import carried_spec
    from mtrain_deploy.exported.model import plugin_of, read_metadata

    metadata = read_metadata(exported / "small.onnx")
    data = {**metadata.spec["data"], "format": "./evil.py:Data"}
    with pytest.raises(CheckpointError, match="not run from a file"):
        carried_spec({**metadata.spec, "data": data}, name="x.onnx")
    with pytest.raises(UsageError, match="not run from a file"):
        plugin_of(metadata.model_copy(update={"model": "./evil.py:Net"}))
    kept = carried_spec(metadata.spec, name="x.onnx")
    assert not {"plugins", "report", "backend", "cluster", "launcher"} & set(kept)


def test_a_model_that_finds_no_boxes_has_none_to_suppress():
    from mtrain_deploy.exporting.suppression import settings_of

    with pytest.raises(SpecError, match="--form nms: the model has no option confidence"):
        settings_of({"options": {"patch": 4}}, {})


@pytest.mark.slow
def test_every_format_and_form_of_a_run(exported):
    """The torch and the Paddle program run without mtrain, and return what the ONNX graph returns."""
    expected = _outputs(exported, "small.onnx")
    done("export", "--run", "runs/small", "--format", "torch", cwd=exported)
    program = _alone(
        exported, "torch", "m = torch.export.load('small.pt2').module(); out = m(torch.from_numpy(x))[0].numpy()"
    )
    np.testing.assert_allclose(program, expected, rtol=1e-5, atol=1e-4)
    if find_spec("paddle") is None:  # not imported here: a process has one framework
        pytest.skip("Paddle is not installed")
    done("export", "--run", "runs/small", "--format", "paddle", cwd=exported)
    for name in ("small.json", "small.pdiparams"):
        assert [word for word in private_words(exported) if word in carried(exported / name)] == [], name
    program = _alone(
        exported,
        "paddle",
        "m = paddle.jit.load('small'); m.eval(); out = m(paddle.to_tensor(x)); "
        "out = (out[0] if isinstance(out, (list, tuple)) else out).numpy()",
    )
    np.testing.assert_allclose(program, expected, rtol=1e-5, atol=1e-4)
    predicted = (
        "import paddle.inference as pdi; c = pdi.Config('{0}.json', '{0}.pdiparams'); p = pdi.create_predictor(c); "
        "[p.get_input_handle(n).copy_from_cpu(v) for n, v in zip(p.get_input_names(), {1})]; p.run(); "
        "out = p.get_output_handle(p.get_output_names()[0]).copy_to_cpu()"
    )
    np.testing.assert_allclose(
        _alone(exported, "paddle", predicted.format("small", "[x]")), expected, rtol=1e-5, atol=1e-4
    )
    (exported / "deployed").mkdir()
    arguments = ("--format", "paddle", "--form", "nms", "--dynamic-size", "--confidence", "0.001")
    done("export", "--run", "runs/small", *arguments, "--out", "deployed/model", cwd=exported)
    steps = yaml.safe_load((exported / "deployed/infer_cfg.yml").read_text())["Preprocess"]
    assert [step["type"] for step in steps] == ["Resize", "Pad", "NormalizeImage", "Permute"]
    given = "[x.transpose(0, 3, 1, 2).astype('float32') / 255, numpy.full((3, 2), 0.5, 'float32')]"
    rows = _alone(exported, "paddle", predicted.format("deployed/model", given))
    from safetensors.numpy import load_file

    from mtrain_deploy.exported.model import ExportedModel, read_metadata

    model = ExportedModel.open(exported / "small.onnx", threads=1).with_options({"confidence": 0.001})
    found = np.concatenate(model.predictions({"images": _images()}))
    assert len(rows) == len(found) > 0
    np.testing.assert_allclose(np.sort(rows[:, 1]), np.sort(found[:, 4]), rtol=1e-4, atol=1e-6)
    # The images were made from ones of twice the size, in whose pixels the boxes are.
    np.testing.assert_allclose(rows[:, 2:].sum(), 2 * found[:, :4].sum(), rtol=1e-4)
    done("export", "--run", "runs/small", "--format", "safetensors", cwd=exported)
    assert not [name for name in load_file(exported / "small.safetensors") if name.endswith("num_batches_tracked")]
    done("export", "--weights", "small.safetensors", "-o", "again.onnx", cwd=exported)
    np.testing.assert_array_equal(_outputs(exported, "again.onnx"), expected)
    again, first = (read_metadata(exported / name) for name in ("again.onnx", "small.onnx"))
    assert (again.class_names, again.category_ids) == (first.class_names, first.category_ids)
    done("export", "--run", "runs/small", "--form", "nms", "-o", "nms.onnx", cwd=exported)
    done("evaluate", "--weights", "nms.onnx", "-o", "data.root=digits", cwd=exported)
    done("evaluate", "--run", "runs/small", "--name", "by-torch", cwd=exported)
    # Boxes of a hardly trained detector have scores so near to each other that their order is a matter of rounding.
    assert metrics(exported / "runs/nms-evaluate")["AP"] == pytest.approx(
        metrics(exported / "runs/by-torch")["AP"], abs=1e-3
    )


@pytest.mark.slow
def test_other_layouts_of_images_give_the_same_outputs(exported):
    """Programs for YOLO models feed (B, 3, H, W) from 0 to 1, and look for stride and classes in the file."""
    done("export", "--run", "runs/small", "--layout", "nchw", "--input", "float", "-o", "yolo.onnx", cwd=exported)
    session = onnxruntime.InferenceSession(exported / "yolo.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, 64, 64]
    images = np.ascontiguousarray(_images().transpose(0, 3, 1, 2) / np.float32(255))
    (found,) = session.run(None, {"images": images})
    np.testing.assert_array_equal(found, _outputs(exported, "small.onnx"))
    np.testing.assert_array_equal(found, _outputs(exported, "yolo.onnx"))
    assert session.run(None, {"images": images[:0]})[0].shape == (0, 252, 15)
    entries = session.get_modelmeta().custom_metadata_map
    assert int(entries["stride"]) == 32
    assert ast.literal_eval(entries["names"]) == dict(enumerate("0123456789"))
    done("export", "--run", "runs/small", "--form", "raw", "--precision", "fp16", "-o", "raw16.onnx", cwd=exported)
    raw = onnxruntime.InferenceSession(exported / "raw16.onnx", providers=["CPUExecutionProvider"])
    assert {output.type for output in raw.get_outputs()} == {"tensor(float)"}


@pytest.mark.slow
def test_openvinos_own_files_compute_what_the_onnx_file_computes(exported):
    openvino = pytest.importorskip("openvino", reason="writes its own files")
    images = _images()
    for form, arguments in {"decoded": (), "fixed": ("--form", "nms-fixed", "--confidence", "0.0001")}.items():
        for out in (f"{form}.xml", f"{form}-of-it.onnx"):
            kind = "openvino" if out.endswith(".xml") else "onnx"
            done("export", "--run", "runs/small", "--format", kind, *arguments, "-o", out, cwd=exported)
        model = openvino.Core().read_model(exported / f"{form}.xml")
        compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        session = onnxruntime.InferenceSession(exported / f"{form}-of-it.onnx", providers=["CPUExecutionProvider"])
        found, expected = compiled(images), session.run(None, {"images": images})
        for number, array in enumerate(expected):
            # Scores that differ by rounding alone may change the order of rows.
            mine, its = (x[..., 4] if form == "fixed" and x.ndim == 3 else x for x in (found[number], array))
            difference = np.abs(mine.astype(float) - its).max() / np.abs(its).max()
            print(form, session.get_outputs()[number].name, difference)
            assert difference < 1e-5
        told = json.loads(model.get_rt_info(["mtrain"]).value)
        assert told["class_names"] == list("0123456789")
        assert model.input().get_any_name() == "images"
    assert (exported / "fixed.bin").is_file()
    refused = mtrain("export", "--run", "runs/small", "--format", "openvino", "-o", "fixed.xml", cwd=exported)
    assert refused.returncode == 2
    assert "fixed.xml exists already" in refused.stderr


def test_without_openvino_its_format_is_refused_with_the_command_that_installs_it(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["export", "--run", "runs/small", "--format", "openvino"]) == 2
    assert "pip install openvino" in capsys.readouterr().err


def _images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3)).astype(np.uint8)


def _outputs(folder: Path, name: str) -> np.ndarray:
    from mtrain_deploy.exported.model import ExportedModel

    return ExportedModel.open(folder / name, threads=1).outputs({"images": _images()})["decoded"]


def _alone(folder: Path, framework: str, code: str) -> np.ndarray:
    """Run a program in a process that cannot import mtrain."""
    np.save(folder / "x.npy", _images())
    text = WITHOUT_FRAMEWORK.partition("from mtrain")[0].replace(
        '"torch", "paddle", "onnx", "onnxscript"', '"mtrain", "mtrain"'
    )
    done(
        cwd=folder,
        program=("-c", f"{text}\nimport numpy, {framework}\nx = numpy.load('x.npy')\n{code}\nnumpy.save('y.npy', out)"),
    )
    return np.load(folder / "y.npy")


@pytest.mark.slow
def test_an_environment_without_frameworks_evaluates_and_predicts(exported, tmp_path):
    """The environment is a real one, whose packages are those of this one but torch, Paddle and what builds on them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    left_out = (
        "torch",
        "paddle",
        "horovod",
        "deepspeed",
        "onnx-",
        "onnxscript",
        "functorch",
        "accelerate",
        "lightning",
    )
    for folder in [Path(entry) for entry in sys.path if entry.endswith("site-packages")]:
        for entry in folder.iterdir():
            if (
                entry.name == "onnx"
                or entry.name.startswith((*left_out, "_", "zz_", "distutils"))
                or (site / entry.name).exists()
            ):
                continue
            (site / entry.name).symlink_to(entry)
    (site / "here.pth").write_text(str(Path(package.__file__).parent.parent) + "\n")
    shutil.copytree(exported / "digits", tmp_path / "digits")
    shutil.copy(exported / "small.onnx", tmp_path)
    for framework in ("torch", "paddle"):
        assert subprocess.run([python, "-c", f"import {framework}"], capture_output=True).returncode == 1
    for arguments in (["evaluate", "-o", "data.root=digits"], ["predict", "digits/images", "--confidence", "0.0"]):
        command = [python, "-m", "mtrain", arguments[0], "--weights", "small.onnx", *arguments[1:]]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
        assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads((tmp_path / "predictions/predictions.json").read_text())


def test_python_exports_and_quantises_as_the_commands_do(exported):
    code = (
        "import mtrain; "
        "files = mtrain.export('runs/small', out='again.onnx', overrides={'train.seed': 3}); print(files[0].name); "
        "print(mtrain.quantise(weights='again.onnx', samples=2, spec='runs/small/spec.yml').name)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=exported, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-2:] == ["again.onnx", "again-int8.onnx"]
    assert (exported / "again-int8.onnx").stat().st_size < (exported / "again.onnx").stat().st_size / 2
