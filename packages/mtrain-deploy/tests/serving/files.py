"""Small exported models, built by hand: what they find is the colour of the image."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mtrain
from mtrain.spec import plugins
from mtrain_deploy.exported.metadata import KEY, Input, Metadata

COLOURS = ("red", "green", "blue")
SIDE = 64
_MODELS = {"detection": "yolov5n", "classification": "vit", "segmentation": "unet"}
_CONFIGS = {"detection": "digits", "classification": "vit_digits", "segmentation": "unet_digits"}
_OUTPUTS = {
    "detection": {"decoded": ("batch", 1, 8)},
    "classification": {"probabilities": ("batch", 3)},
    "segmentation": {"classes": ("batch", SIDE, SIDE), "certainty": ("batch", SIDE, SIDE)},
}


def exported(path: Path, task: str, *, batch: int | str = "batch", rounds: int = 0, form: str = "decoded") -> Path:
    """Write an exported model whose classes are the colours; ``rounds`` convolutions of 32 channels make it slower.

    Detection finds one box, the middle of the input, of the colour with the largest mean. The score is that mean.
    """
    import onnx
    from onnx import TensorProto, helper

    key = "pixels" if task == "segmentation" else "images"
    nodes, constants = _graph(task, key, rounds)
    outputs = {name: (batch, *shape[1:]) for name, shape in _OUTPUTS[task].items()}
    kind = TensorProto.UINT8 if task == "segmentation" else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info(key, TensorProto.UINT8, (batch, SIDE, SIDE, 3))],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()],
        constants,
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(file, {KEY: _metadata(task, key, batch, outputs, form).text()})
    onnx.checker.check_model(file)
    path.write_bytes(file.SerializeToString())
    return path


def _graph(task: str, key: str, rounds: int) -> tuple[list[Any], list[Any]]:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    def constant(name: str, values: Any, dtype: Any) -> Any:
        return numpy_helper.from_array(np.asarray(values, dtype), name)

    constants = [
        constant("full", 255, np.float32),
        constant("plane", [1, 2], np.int64),
        constant("zero", 0, np.float32),
    ]
    nodes = [helper.make_node("Cast", [key], ["raw"], to=TensorProto.FLOAT)]
    if rounds:  # adds zero to the input, after some work
        constants += [
            constant("first", np.zeros((32, 3, 3, 3)), np.float32),
            constant("between", np.zeros((32, 32, 3, 3)), np.float32),
            constant("last", np.zeros((3, 32, 1, 1)), np.float32),
        ]
        nodes += [helper.make_node("Transpose", ["raw"], ["nchw"], perm=[0, 3, 1, 2])]
        nodes += [helper.make_node("Conv", ["nchw", "first"], ["deep0"], pads=[1, 1, 1, 1])]
        for number in range(rounds):
            name = f"deep{number + 1}"
            nodes += [helper.make_node("Conv", [f"deep{number}", "between"], [name], pads=[1, 1, 1, 1])]
        nodes += [
            helper.make_node("Conv", [f"deep{rounds}", "last"], ["nothing"]),
            helper.make_node("Transpose", ["nothing"], ["nowhere"], perm=[0, 2, 3, 1]),
            helper.make_node("Add", ["raw", "nowhere"], ["colours"]),
        ]
    else:
        nodes += [helper.make_node("Identity", ["raw"], ["colours"])]
    if task == "segmentation":
        constants += [constant("channel", [3], np.int64)]
        nodes += [
            helper.make_node("ArgMax", ["colours"], ["best"], axis=3, keepdims=0),
            helper.make_node("Cast", ["best"], ["classes"], to=TensorProto.UINT8),
            helper.make_node("ReduceMax", ["colours", "channel"], ["most"], keepdims=0),
            helper.make_node("Cast", ["most"], ["certainty"], to=TensorProto.UINT8),
        ]
        return nodes, constants
    nodes += [
        helper.make_node("ReduceMean", ["colours", "plane"], ["means"], keepdims=0),
        helper.make_node("Div", ["means", "full"], ["shares" if task == "detection" else "probabilities"]),
    ]
    if task == "detection":
        middle = [SIDE / 2, SIDE / 2, SIDE / 2, SIDE / 4, 1.0]
        constants += [constant("box", [middle], np.float32), constant("axis", [1], np.int64)]
        constants += [constant("none", np.zeros((3, 5)), np.float32)]
        nodes += [
            helper.make_node("MatMul", ["shares", "none"], ["nowhere_BC"]),
            helper.make_node("Add", ["nowhere_BC", "box"], ["boxes"]),
            helper.make_node("Concat", ["boxes", "shares"], ["row"], axis=1),
            helper.make_node("Unsqueeze", ["row", "axis"], ["decoded"]),
        ]
    return nodes, constants


def _metadata(task: str, key: str, batch: int | str, outputs: Mapping[str, Any], form: str) -> Metadata:
    name = _MODELS[task]
    spec = mtrain.load_spec(_CONFIGS[task], overrides={"data.image_size": SIDE}).spec
    loaded = plugins.load("models", name)
    options = loaded.Options()
    return Metadata(
        mtrain=mtrain.__version__,
        kind=task,
        model=name,
        options=json.loads(options.model_dump_json()),
        class_names=COLOURS,
        image_size=SIDE,
        inputs=(Input(name=key, key=key, dtype="uint8", shape=(batch, SIDE, SIDE, 3), layout="NHWC"),),
        outputs=dict(outputs),
        form=form,
        dynamic=("batch",) if isinstance(batch, str) else (),
        precision="fp32",
        spec={**json.loads(spec.model_dump_json(by_alias=True)), "plugins": None},
    )
