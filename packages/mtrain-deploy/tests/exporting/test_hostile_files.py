"""ONNX files of strangers: each is refused in one sentence, and none reads other files, runs for ever or fills the memory."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from tests.serving.files import exported

from mtrain.commands import main
from mtrain.errors import CheckpointError
from mtrain_deploy.exported.graph_check import check_graph
from mtrain_deploy.exported.model import ExportedModel
from mtrain_deploy.exported.values import check_predictions

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

VAST = 2**60
Change = Callable[[Any, dict[str, Any]], None]


def subgraph(name: str) -> Any:
    from onnx import TensorProto, helper

    given = [
        helper.make_tensor_value_info(f"{name}_{i}", *kind) for i, kind in enumerate(((7, []), (9, []), (1, None)))
    ]
    nodes = [helper.make_node("Identity", [f"{name}_{i}"], [f"{name}_out_{i}"]) for i in (1, 2)]
    out = [helper.make_tensor_value_info(f"{name}_out_1", TensorProto.BOOL, [])]
    return helper.make_graph(nodes, name, given, [*out, helper.make_tensor_value_info(f"{name}_out_2", 1, None)])


def instead_of_raw(file: Any, *nodes: Any, constants: tuple[Any, ...] = ()) -> None:
    """Compute ``raw`` from ``cast`` by ``nodes``."""
    (cast,) = [node for node in file.graph.node if node.output[0] == "raw"]
    cast.output[0] = "cast"
    rest = [node for node in file.graph.node if node is not cast]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (cast, *nodes, *rest)]
    del file.graph.node[:]
    file.graph.node.extend(kept)
    file.graph.initializer.extend(constants)


def constant(name: str, values: Any, dtype: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(values, dtype), name)


def endless_loop(file: Any, _: dict[str, Any]) -> None:
    node = onnx.helper.make_node("Loop", ["vast", "yes", "cast"], ["raw"], body=subgraph("body"))
    instead_of_raw(file, node, constants=(constant("vast", VAST, np.int64), constant("yes", True, np.bool_)))


def loop_within_a_branch(file: Any, _: dict[str, Any]) -> None:
    from onnx import helper

    loop = helper.make_node("Loop", ["vast", "yes", "cast"], ["inner"], body=subgraph("body"))
    out = [helper.make_tensor_value_info("inner", 1, None)]
    branch = helper.make_graph([loop], "branch", [], out)
    same = helper.make_graph([helper.make_node("Identity", ["cast"], ["inner"])], "same", [], out)
    node = helper.make_node("If", ["yes"], ["raw"], then_branch=branch, else_branch=same)
    instead_of_raw(file, node, constants=(constant("vast", VAST, np.int64), constant("yes", True, np.bool_)))


def endless_scan(file: Any, _: dict[str, Any]) -> None:
    node = onnx.helper.make_node("Scan", ["cast"], ["raw"], body=subgraph("body"), num_scan_inputs=1)
    instead_of_raw(file, node)


def dividing(file: Any, _: dict[str, Any], *, at_load: bool = False) -> None:
    """Divide the smallest integer by -1, which ends the process that computes it by SIGFPE."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Cast", ["cast"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Mul", ["whole", "div_zero"], ["zeros"]),
        helper.make_node("Add", ["div_least", "div_least" if at_load else "zeros"], ["leasts"]),
        helper.make_node("Div", ["div_least" if at_load else "leasts", "div_minus"], ["many"]),
        helper.make_node("Add", ["many", "zeros"], ["more"]),
        helper.make_node("Cast", ["more"], ["raw"], to=TensorProto.FLOAT),
    ]
    least, minus, zero = (
        constant(n, v, np.int64) for n, v in (("div_least", -(2**63)), ("div_minus", -1), ("div_zero", 0))
    )
    instead_of_raw(file, *nodes, constants=(least, minus, zero))


def unused_functions(file: Any, _: dict[str, Any]) -> None:
    from onnx import helper

    opset = [helper.make_opsetid("", 18)]
    file.functions.append(
        helper.make_function("", "Identity2", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], opset)
    )


def functions_in_functions(file: Any, _: dict[str, Any]) -> None:
    """Each calls the one below ten times, which ONNX Runtime would write out."""
    from onnx import helper

    opset = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    below = "Identity"
    for level in range(12):
        domain = "" if below == "Identity" else "own"
        nodes = [helper.make_node(below, [f"x{i}"], [f"x{i + 1}"], domain=domain) for i in range(10)]
        file.functions.append(helper.make_function("own", f"f{level}", ["x0"], ["x10"], nodes, opset))
        below = f"f{level}"
    file.opset_import.append(helper.make_opsetid("own", 1))
    instead_of_raw(file, helper.make_node(below, ["cast"], ["raw"], domain="own"))


def vast_expansion(file: Any, _: dict[str, Any]) -> None:
    node = onnx.helper.make_node("Expand", ["cast", "shape"], ["raw"])
    instead_of_raw(file, node, constants=(constant("shape", [2**33, 1, 1, 3], np.int64),))


def vast_constant(file: Any, _: dict[str, Any]) -> None:
    from onnx import helper

    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["nought"], keepdims=0),
        helper.make_node("Add", ["cast", "nought"], ["raw"]),
    ]
    instead_of_raw(file, *nodes, constants=(constant("shape", [2**38], np.int64),))


def declared_weights(file: Any, _: dict[str, Any]) -> None:
    file.graph.initializer[0].dims[:] = [VAST]


def negative_weights(file: Any, _: dict[str, Any]) -> None:
    file.graph.initializer[0].dims[:] = [-4]


def weights_elsewhere(file: Any, _: dict[str, Any]) -> None:
    tensor = file.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../../../../etc/passwd"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)


def constant_elsewhere(file: Any, _: dict[str, Any]) -> None:
    weights_elsewhere(file, {})
    tensor = file.graph.initializer[0]
    node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
    file.graph.node.insert(0, node)
    del file.graph.initializer[0]


def sparse_weights(file: Any, _: dict[str, Any]) -> None:
    values = constant("full", [255], np.float32)
    del file.graph.initializer[0]
    file.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(values, constant("places", [0], np.int64), [2**40])
    )


def vast_input(file: Any, values: dict[str, Any]) -> None:
    file.graph.input[0].type.tensor_type.shape.dim[1].dim_value = VAST
    values["inputs"][0]["shape"] = ["batch", VAST, VAST, 3]


def vast_batch(file: Any, values: dict[str, Any]) -> None:
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = VAST
    values["inputs"][0]["shape"][0] = VAST


def large_batch(file: Any, values: dict[str, Any]) -> None:
    """One that the metadata may have: an image is repeated to fill it."""
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**31
    values["inputs"][0]["shape"][0] = 2**31


def set_value(*path: Any, value: Any) -> Change:
    def change(_: Any, values: dict[str, Any]) -> None:
        place: Any = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


CASES: dict[str, tuple[str, Change, str]] = {
    "endless loop": ("classification", endless_loop, "Loop"),
    "loop within a branch": ("classification", loop_within_a_branch, "Loop"),
    "endless scan": ("classification", endless_scan, "Scan"),
    "unused functions": ("classification", unused_functions, "functions"),
    "functions in functions": ("classification", functions_in_functions, "of own"),
    "vast expansion": ("classification", vast_expansion, "memory"),
    "vast constant": ("classification", vast_constant, "memory"),
    "declared weights": ("classification", declared_weights, "does not hold"),
    "negative weights": ("classification", negative_weights, "does not hold"),
    "weights elsewhere": ("classification", weights_elsewhere, "other files"),
    "constant elsewhere": ("classification", constant_elsewhere, "other files"),
    "sparse weights": ("classification", sparse_weights, "sparse"),
    "vast input": ("classification", vast_input, "damaged"),
    "vast batch": ("classification", vast_batch, "damaged"),
    "large batch": ("classification", large_batch, "damaged"),
    "batch of 0": ("classification", set_value("inputs", 0, "shape", 0, value=0), "damaged"),
    "no axes": ("classification", set_value("inputs", 0, "shape", value=[]), "damaged"),
    "dtype object": ("classification", set_value("inputs", 0, "dtype", value="object"), "damaged"),
    "image size": ("classification", set_value("image_size", value=VAST), "damaged"),
    "steps of 0": ("classification", set_value("size_step", value=0), "damaged"),
    "no class names": ("classification", set_value("class_names", value=[]), "class_names"),
    "one class name": ("classification", set_value("class_names", value=["red"]), "1 classes"),
    "one class of boxes": ("detection", set_value("class_names", value=["red"]), "1 classes"),
    "two classes of pixels": ("segmentation", set_value("class_names", value=["red", "green"]), "2 classes"),
    "strange class name": ("classification", set_value("class_names", 0, value="caf\udce9"), "damaged"),
    "other ids": ("detection", set_value("category_ids", value=[1, 2]), "ids of categories"),
    "one id for all": ("detection", set_value("category_ids", value=[1, 1, 1]), "ids of categories"),
    "a division": (
        "classification",
        dividing,
        r"x\.onnx: cannot be computed \(has ended the process that works with it by SIGFPE",
    ),
    "a division while it is loaded": (
        "classification",
        lambda file, values: dividing(file, values, at_load=True),
        r"x\.onnx: cannot be loaded as an ONNX file.* by SIGFPE",
    ),
    "other model": ("classification", set_value("model", value="unet"), "export|model"),
    "long name of a model": ("classification", set_value("model", value="x" * 5000), "model"),
    "no such model": ("classification", set_value("model", value="x"), "model"),
    "other task": ("classification", set_value("kind", value="detection"), "."),
    "no such task": ("classification", set_value("kind", value="../../x"), "."),
    "options": ("detection", set_value("options", "max_candidates", value=-5), "."),
    "spec": ("classification", set_value("spec", value={"data": [1]}), "."),
    "deep spec": ("classification", set_value("spec", value=json.loads("[" * 300 + "]" * 300)), "."),
    "other outputs": ("classification", set_value("outputs", "probabilities", value=["batch", 5]), "shape"),
    "colour": ("classification", set_value("inputs", 0, "key", value="pixels"), "pixels|array"),
}


def changed(path: Path, task: str, change: Change) -> Path:
    """Write a correct file with one change of its graph or of its metadata."""
    exported(path, task)
    file = onnx.load(str(path))
    values = json.loads(file.metadata_props[0].value)
    values["spec"]["data"]["workers"] = 0
    change(file, values)
    file.metadata_props[0].value = json.dumps(values)
    path.write_bytes(file.SerializeToString())
    return path


def written_images(folder: Path) -> Path:
    folder.mkdir()
    for number, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        cv2.imwrite(str(folder / f"{number}.png"), np.full((64, 64, 3), colour, np.uint8))
    return folder


OF_THE_GRAPH = ("endless loop", "loop within a branch", "endless scan", "unused functions", "functions in functions")
OF_WEIGHTS = ("declared weights", "negative weights", "weights elsewhere", "constant elsewhere", "sparse weights")


@pytest.mark.parametrize("name", OF_THE_GRAPH + OF_WEIGHTS)
def test_a_graph_that_its_bytes_do_not_bound_is_refused_before_it_is_opened(name, tmp_path):
    task, change, says = CASES[name]
    with pytest.raises(CheckpointError, match=says):
        check_graph(changed(tmp_path / "x.onnx", task, change))


@pytest.mark.parametrize(
    ("label", "is_refused"), [(1.0, False), (2.0, True), (-1.0, True), (0.5, True), (np.nan, True)]
)
def test_boxes_of_classes_that_have_no_name_are_refused(label, is_refused):
    metadata = SimpleNamespace(kind="detection", class_names=("red", "green"))
    rows = [np.array([[0, 0, 1, 1, 0.5, 0.0], [0, 0, 1, 1, 0.5, label]])]
    with pytest.raises(CheckpointError, match="others than the 2 classes") if is_refused else nullcontext():
        check_predictions(rows, metadata, name="x.onnx")


@pytest.mark.job
@pytest.mark.parametrize("name", CASES)
def test_a_file_of_a_stranger_is_refused_in_one_sentence(name, tmp_path, monkeypatch, capsys):
    task, change, says = CASES[name]
    monkeypatch.chdir(tmp_path)
    changed(Path("x.onnx"), task, change)
    arguments = ["predict", "--weights", "x.onnx", "--out", "out", str(written_images(tmp_path / "images"))]
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "Traceback" not in printed
    assert len(printed) < 2000
    assert re.search(says, printed), printed
    assert not (tmp_path / "out/predictions.json").exists()


@pytest.mark.job
@pytest.mark.parametrize("task", ["detection", "classification", "segmentation"])
def test_a_correct_file_predicts_and_one_with_a_branch_computes(task, tmp_path, monkeypatch):
    from onnx import helper

    def branch(file: Any, _: dict[str, Any]) -> None:
        out = [helper.make_tensor_value_info("inner", 1, None)]
        graphs = [helper.make_graph([helper.make_node("Identity", ["cast"], ["inner"])], n, [], out) for n in "ab"]
        node = helper.make_node("If", ["yes"], ["raw"], then_branch=graphs[0], else_branch=graphs[1])
        instead_of_raw(file, node, constants=(constant("yes", True, np.bool_),))

    monkeypatch.chdir(tmp_path)
    key = "pixels" if task == "segmentation" else "images"
    batch = {key: np.full((2, 64, 64, 3), (10, 200, 30), np.uint8)}
    plain = ExportedModel.open(exported(Path("a.onnx"), task), threads=1).outputs(batch)
    other = ExportedModel.open(changed(Path("b.onnx"), task, branch), threads=1).outputs(batch)
    assert plain.keys() == other.keys()
    assert all(np.array_equal(plain[name], other[name]) for name in plain)
    images = str(written_images(tmp_path / "images"))
    changed(Path("a.onnx"), task, lambda *_: None)
    assert main(["predict", "--weights", "a.onnx", "--out", "out", "--confidence", "0.2", images]) == 0


@pytest.mark.job
@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_refused_or_computed(seed, tmp_path):
    """Any byte may be wrong: the file is refused, or it computes something; there is no other error."""
    whole = bytearray(exported(tmp_path / "x.onnx", "classification").read_bytes())
    rng = np.random.default_rng(seed)
    for _ in range(8):
        content = whole.copy()
        for place in rng.integers(0, len(content), 4):
            content[place] = rng.integers(256)
        (tmp_path / "y.onnx").write_bytes(content)
        try:
            model = ExportedModel.open(tmp_path / "y.onnx", threads=1)
            model.outputs({"images": np.zeros((1, 64, 64, 3), np.uint8)})
        except CheckpointError:
            pass


@pytest.mark.job
def test_a_graph_that_expands_takes_no_memory_that_the_machine_lacks(tmp_path):
    """With 3 GiB of address space, which it would need a hundred times."""
    changed(tmp_path / "x.onnx", "classification", vast_expansion)
    written_images(tmp_path / "images")
    ended = subprocess.run(
        [sys.executable, "-m", "mtrain", "predict", "--weights", "x.onnx", "--out", "out", "images"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: x.onnx")
    assert ended.stderr.count("\n") == 1
