"""Write a model as a Paddle inference program, in evaluation mode."""

import sys
from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle import internals, state
from mtrain.core.interfaces import Array
from mtrain.core.interfaces.program import Program
from mtrain.core.overriding import override
from mtrain.errors import SpecError


class _Traced(Layer):
    """A network whose input is one tensor and whose outputs are tensors in order, as a program has them."""

    def __init__(self, network: Layer, program: Program) -> None:
        super().__init__()
        self.network = network
        self.given = program.inputs[0]
        self.raw = program.raw
        self.names: list[str] = []

    @override
    def forward(self, array: Tensor) -> tuple[Tensor, ...]:
        if self.given.layout == "CHW":
            array = paddle.transpose(array, (0, 2, 3, 1))
        if self.given.layout and self.given.dtype == "float32":
            array = array * 255  # images are in 0..1, as mtrain's loaders do not have them
        batch = {self.given.key: array}
        outputs: dict[str, Tensor] = self.network.raw(batch) if self.raw else self.network(batch)
        self.names = list(outputs)
        return tuple(outputs.values())


class _Detector(Layer):
    """A detector with suppression inside, as PaddleDetection exports one: boxes are in pixels of the image as it was read."""

    names = ("boxes", "counts")

    def __init__(self, traced: _Traced, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.traced, self.settings = traced, settings

    @override
    def forward(self, image: Tensor, scale_factor: Tensor) -> tuple[Tensor, Tensor]:
        return self.detected(image, scale_factor)  # Paddle rewrites the code of this method, and of no other

    def detected(self, image: Tensor, scale_factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes of all images, and their numbers."""
        values = self.traced(image)
        outputs = dict(zip(self.traced.names, values, strict=True))
        if "decoded" in outputs:
            decoded_BND = outputs["decoded"]
            centre_BN2, half_BN2 = decoded_BND[:, :, :2], decoded_BND[:, :, 2:4] / 2
            boxes_BN4 = paddle.concat((centre_BN2 - half_BN2, centre_BN2 + half_BN2), 2)
            scores_BNC = decoded_BND[:, :, 5:] * decoded_BND[:, :, 4:5]
        else:
            boxes_BN4, scores_BNC = outputs["boxes"], outputs["scores"]
        if not self.settings["multi_label"]:
            best_BN1 = paddle.max(scores_BNC, 2, keepdim=True)
            scores_BNC = paddle.where(scores_BNC == best_BN1, scores_BNC, paddle.zeros_like(scores_BNC))
        xy_B2 = paddle.flip(scale_factor, [1])  # it has that of height first
        boxes_BN4 = boxes_BN4 / paddle.unsqueeze(paddle.concat((xy_B2, xy_B2), 1), 1)
        return internals.suppressed(boxes_BN4, paddle.transpose(scores_BNC, (0, 2, 1)), self.settings)


def write(network: Layer, weights: Mapping[str, Array], program: Program) -> list[str]:
    """See ``Capabilities.export``.

    Raises:
        SpecError: The network cannot be traced, or reads several arrays.
    """
    if len(program.inputs) != 1:
        keys = ", ".join(given.key for given in program.inputs)
        raise SpecError(
            f"--format paddle: takes models that read one array of a batch, this one reads {keys}; use onnx"
        )
    state.fill(network.state_dict(), weights, what="weights")
    traced: Any = _Traced(network, program)
    inputs = _inputs(program)
    if program.suppression:
        traced = _Detector(traced, program.suppression)
        inputs[0].name = "image"
        inputs.append(paddle.static.InputSpec([program.batch or -1, 2], "float32", "scale_factor"))
    traced.eval()
    # Paddle rewrites the Python code that it traces, and does not know all of it. Nothing of mtrain's needs that: which
    # branch runs depends on no value of a tensor.
    paddle.jit.ignore_module(
        [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "mtrain"]
    )
    try:
        saved = paddle.jit.to_static(traced, input_spec=inputs, full_graph=True)
        paddle.jit.save(saved, str(program.path))
    except Exception as error:  # a network may do anything that cannot be traced
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        advice = "" if program.batch else "; --batch-size N, a fixed one, may help"
        raise SpecError(
            f"the model cannot be exported: Paddle could not trace it ({lines[-1].strip()[:300]}){advice}"
        ) from error
    return list(traced.names)


def _inputs(program: Program) -> list[Any]:
    """Return the description of each input; -1 is an axis of any size."""
    specs = []
    for given in program.inputs:
        shape = [program.batch or -1, *given.shape]
        for axis in given.sides if program.size_step else ():
            shape[axis] = -1
        dtype: Any = given.dtype
        specs.append(paddle.static.InputSpec(shape, dtype, given.name or given.key))
    return specs
