"""`mtrain weights`, and a job that starts from files of other programs, through the real command line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mtrain.commands import main
from mtrain.core.checkpoint.format import Saved
from mtrain.core.checkpoint.format import write as write_checkpoint
from mtrain.core.interfaces import Progress, State
from mtrain.weights.reading import read
from mtrain.weights.writing import write
from tests.starts import starts_processes
from tests.weights import golden


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write(folder / "yolov5n.pt", golden.yolov5("n"))
    write(folder / "ppyoloe_s.pdparams", golden.ppyoloe("s"))
    return folder


def test_import_and_export_give_the_published_file_again(files, tmp_path, capsys):
    neutral, back = tmp_path / "p.safetensors", tmp_path / "p.pdparams"
    assert (
        main(["weights", "import", str(files / "ppyoloe_s.pdparams"), "--model", "ppyoloe_s", "--to", str(neutral)])
        == 0
    )
    output = capsys.readouterr()
    assert "ppyoloe_s with 80 classes: 423 of 501 arrays taken" in output.out
    assert "78 counters that such files do not hold are 0" in output.out
    assert output.err == ""
    assert main(["weights", "export", str(neutral), "--model", "ppyoloe_s", "--to", str(back)]) == 0
    golden.equal(read(back).arrays, golden.ppyoloe("s"))
    assert list(read(back).arrays) == list(golden.ppyoloe("s"))
    again = tmp_path / "again.safetensors"
    assert main(["weights", "import", str(back), "--model", "ppyoloe_s", "--to", str(again)]) == 0
    assert again.read_bytes() == neutral.read_bytes()


def test_show_lists_names_types_and_shapes(files, capsys):
    assert main(["weights", "show", str(files / "yolov5n.pt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("yolov5n.pt: torch, a state dict: 349 arrays of float32, int64, 7.2 MiB")
    assert lines[1].split(maxsplit=2) == ["model.0.conv.weight", "float32", "(16, 3, 6, 6)"]
    assert len(lines) == 350


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("import {files}/yolov5n.pt --model yolov5s --to {out}/w.safetensors", "349 fit yolov5n: use that model"),
        ("import {files}/yolov5n.pt --model yolov5n --to {out}/w.pt", "import writes .safetensors"),
        ("import {files}/yolov5n.pt --model yolov5nn --to {out}/w.safetensors", "did you mean 'yolov5n'?"),
        ("import {files}/none.pt --model yolov5n --to {out}/w.safetensors", "none.pt does not exist"),
        ("export {files}/yolov5n.pt --to {out}/w.pdparams", "give --model NAME"),
        ("export {files}/yolov5n.pt --model yolov5n --to {files}/yolov5n.pt", "exists already; give --force"),
        ("export {files}/yolov5n.pt --model yolov5n --to {out}/none/w.pt", "does not exist; make it first"),
        ("export {files} --model yolov5n --to {out}/w.pt", "neither a checkpoint nor a run folder"),
        ("show {files}", "neither a checkpoint nor a run folder"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(files, tmp_path, capsys, arguments, message):
    assert main(["weights", *arguments.format(files=files, out=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_form_for_inference_has_the_published_names_and_shapes(files, tmp_path, capsys):
    whole = {name: np.abs(array) for name, array in golden.ppyoloe("s").items()}
    write(tmp_path / "whole.pdparams", whole)
    arguments = [str(tmp_path / "whole.pdparams"), "--model", "ppyoloe_s", "--deploy"]
    assert main(["weights", "export", *arguments, "--to", str(tmp_path / "d.pdparams")]) == 0
    assert "for inference: 391 arrays" in capsys.readouterr().out  # 335, and the counters that are left
    actual = read(tmp_path / "d.pdparams").arrays
    expected = np.load(golden.DATA / "golden_ppyoloe" / "deploy" / "s_nc80_128x128.npz")
    shapes = map(json.loads, expected["shapes"].tolist())
    assert {n: list(a.shape) for n, a in actual.items()} == dict(zip(expected["names"].tolist(), shapes, strict=True))
    block = "backbone.stages.0.blocks.0.conv2"

    def folded(branch):
        gamma, beta, mean, variance = (
            whole[f"{branch}.bn.{leaf}"] for leaf in ("weight", "bias", "_mean", "_variance")
        )
        scale = gamma / np.sqrt(variance + 1e-5)
        return whole[f"{branch}.conv.weight"] * scale[:, None, None, None], beta - mean * scale

    (kernel, bias), (point, shift) = folded(f"{block}.conv1"), folded(f"{block}.conv2")
    kernel[:, :, 1, 1] += point[:, :, 0, 0]
    np.testing.assert_allclose(actual[f"{block}.conv.weight"], kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual[f"{block}.conv.bias"], bias + shift, rtol=1e-4, atol=1e-5)


def test_the_form_for_inference_needs_a_model_that_has_one_and_all_its_arrays(files, tmp_path, capsys):
    arguments = ["weights", "export", "--deploy", "--to", str(tmp_path / "d.safetensors")]
    assert main([*arguments, str(files / "yolov5n.pt"), "--model", "yolov5n"]) == 2
    assert "--deploy: yolov5n has no form for inference of its own" in capsys.readouterr().err
    some = {n: a for n, a in golden.ppyoloe("s").items() if not n.endswith("conv2.conv2.bn.bias")}
    write(tmp_path / "some.pdparams", some)
    assert main([*arguments, str(tmp_path / "some.pdparams"), "--model", "ppyoloe_s"]) == 2
    stderr = capsys.readouterr().err
    assert "--deploy: needs every array of ppyoloe_s; " in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "d.safetensors").exists()


def test_a_model_whose_batchnorms_were_folded_is_refused_and_it_is_said_what_to_do(tmp_path, capsys):
    """As YOLOv5's `fuse()` leaves it: convolutions have a bias, and there are no statistics."""
    state = {n: a for n, a in golden.yolov5("n").items() if ".bn." not in n}
    biases = {n.replace("conv.weight", "conv.bias"): np.zeros(len(a)) for n, a in state.items() if "conv.weight" in n}
    write(tmp_path / "fused.pt", state | biases)
    arguments = ["weights", "import", str(tmp_path / "fused.pt"), "--model", "yolov5n"]
    assert main([*arguments, "--to", str(tmp_path / "w.safetensors")]) == 2
    stderr = capsys.readouterr().err
    assert "its BatchNorm layers were folded into the convolutions" in stderr
    assert "give the file that training saved (YOLOv5: weights/best.pt or last.pt)" in stderr
    assert main(["-c", "digits", "-o", "model.name=yolov5n", f"model.weights={tmp_path / 'fused.pt'}"]) == 2
    assert "model.weights: " in (stderr := capsys.readouterr().err)
    assert "folded into the convolutions" in stderr


@pytest.mark.smoke
@pytest.mark.job
def test_no_framework_is_imported(files, tmp_path):
    code = (
        f"from mtrain.commands import main; assert main(['weights', 'import', {str(files / 'ppyoloe_s.pdparams')!r}, '--model', "
        f"'ppyoloe_s', '--to', {str(tmp_path / 'w.safetensors')!r}]) == 0; import sys; "
        "assert not {'torch', 'paddle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


# ------------------------------------------------------------------------------------------------------------ jobs
def mtrain(*arguments, cwd):
    command = [sys.executable, "-m", "mtrain", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


SIZES = ("data.image_size=64", "train.batch_size=8", "data.workers=0", "report.plots=false", "report.tensorboard=false")
VALUES = ("-c", "digits", "-o", "data.format=coco", "data.root=digits", *SIZES)
JOB = ("-b", "solo", *VALUES)


@pytest.fixture(scope="module")
@starts_processes
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    made = mtrain("data", "make", "digits", "digits", "--train", "8", "--val", "4", "--size", "64", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder


def test_a_job_starts_from_a_published_file_says_once_what_was_left_out_and_needs_it_no_more(files, digits):
    weights = files / "yolov5n.pt"
    process = mtrain("train", *JOB, f"model.weights={weights}", "--name", "tuned", "--epochs", "1", cwd=digits)
    assert process.returncode == 0, process.stdout + process.stderr
    summary = f"model.weights: {weights} (torch, a state dict): 342 of 349 arrays taken"
    left = "model.weights: the number of classes differs, so the head keeps its start values (6 arrays): model.24.m.0.weight"
    log = (digits / "runs/tuned/logs/rank-0.log").read_text()
    for told in (summary, left, "taken from this job's data, not from the file (1 array): model.24.anchors"):
        assert process.stdout.count(told) == 1
        assert log.count(told) == 1
    records = [json.loads(line) for line in (digits / "runs/tuned/metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records[:4]] == ["start", "note", "warning", "warning"]
    exported = mtrain("weights", "export", "runs/tuned", "--to", "tuned.pt", cwd=digits)
    assert exported.returncode == 0, exported.stderr
    actual = read(digits / "tuned.pt").arrays
    assert actual.keys() == golden.yolov5("n").keys()
    assert actual["model.24.m.0.bias"].shape == (45,)
    np.testing.assert_array_equal(
        actual["model.0.bn.num_batches_tracked"], golden.yolov5("n")["model.0.bn.num_batches_tracked"] + 1
    )
    own = mtrain("evaluate", "--run", "runs/tuned", "-o", "model.weights=gone.pt", cwd=digits)
    assert own.returncode == 0, own.stdout + own.stderr
    on = mtrain("train", "--resume", "runs/tuned", "--epochs", "2", "-o", "model.weights=gone.pt", cwd=digits)
    assert on.returncode == 0, on.stdout + on.stderr
    assert "model.weights:" not in own.stdout + on.stdout
    again = mtrain("evaluate", *JOB, "--weights", "tuned.pt", cwd=digits)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("349 of 349 arrays taken") == 1


@pytest.mark.slow
def test_the_form_for_inference_is_scored_with_the_option_that_says_so(digits):
    data = (
        "data.format=coco",
        "data.root=digits",
        "data.train=null",
        "data.val=null",
        "data.images=null",
        "data.names=null",
    )
    job = ("-b", "solo", "-c", "ppyoloe_s_bccd", "--nproc-per-node", "1", "-o", *data, *SIZES)
    process = mtrain("train", *job, "--name", "deployed", "--epochs", "1", cwd=digits)
    assert process.returncode == 0, process.stdout + process.stderr
    exported = mtrain("weights", "export", "runs/deployed", "--deploy", "--to", "d.safetensors", cwd=digits)
    assert exported.returncode == 0, exported.stderr
    scored = mtrain("evaluate", *job, "model.options.deploy=true", "--weights", "d.safetensors", cwd=digits)
    assert scored.returncode == 0, scored.stdout + scored.stderr
    assert "391 of 391 arrays taken" in scored.stdout
    refused = mtrain("evaluate", *job, "--weights", "d.safetensors", cwd=digits)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "not in the file, so start values stay" in refused.stderr


@pytest.mark.parametrize(
    ("command", "values", "message"),
    [
        # That PP-YOLOE+ takes all of these arrays too, and has further ones, is no reason to name it.
        ("train", "model.weights={files}/ppyoloe_s.pdparams", "423 fit ppyoloe_s: use that model, or another file"),
        ("train", "model.weights={files}/none.pdparams", "model.weights: {files}/none.pdparams does not exist"),
        ("evaluate", "model.weights={files}/yolov5n.pt", "evaluation needs all: the number of classes differs"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_starts(files, digits, command, values, message):
    model = "model.name=yolov5n"
    process = mtrain(command, *JOB, model, values.format(files=files), "--name", "refused", cwd=digits)
    assert process.returncode == 2, process.stdout + process.stderr
    assert message.format(files=files) in process.stderr
    assert process.stderr.count("\n") == 1
    assert not (digits / "runs" / "refused").exists()


def test_predict_refuses_weights_of_other_classes(files, digits):
    names = f"data.names=[{','.join(repr(str(digit)) for digit in range(10))}]"
    process = mtrain("predict", *VALUES, names, "--weights", str(files / "yolov5n.pt"), "digits/images", cwd=digits)
    assert process.returncode == 2, process.stdout + process.stderr
    assert "the number of classes differs" in process.stderr
    assert "Traceback" not in process.stderr


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        assert main(["weights", "show", name]) == 2
        assert "expected a regular file" in capsys.readouterr().err


def test_plugins_that_only_a_checkpoint_names_are_not_loaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_model_of_a_run.py").write_text("from mtrain.models.yolov5.model import YOLOv5n as Own\n")
    (tmp_path / "own" / "plugins.toml").write_text('[models.mine]\nmodule = "own_model_of_a_run:Own"\n')
    spec = {"plugins": str(tmp_path / "own" / "plugins.toml"), "model": {"name": "mine", "options": {}}}
    neutral = tmp_path / "neutral.safetensors"
    published = tmp_path / "yolov5n.pt"
    write(published, golden.yolov5("n"))
    assert main(["weights", "import", str(published), "--model", "yolov5n", "--to", str(neutral)]) == 0
    state = State(weights=dict(read(neutral).arrays))
    write_checkpoint(tmp_path / "step-00000001", Saved(state=state, progress=Progress(update=1), spec=spec))
    target = tmp_path / "out.pt"
    assert main(["weights", "export", str(tmp_path / "step-00000001"), "--to", str(target)]) == 2
    assert f"run the command in the folder of that {'plugins.toml'}" in capsys.readouterr().err
    assert "own_model_of_a_run" not in sys.modules
    monkeypatch.chdir(tmp_path / "own")
    assert main(["weights", "export", str(tmp_path / "step-00000001"), "--to", str(target)]) == 0, capsys.readouterr()
    assert "mine with 80 classes: 349 of 349 arrays taken" in capsys.readouterr().out
