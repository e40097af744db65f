"""Write a model as a Paddle inference program, in evaluation mode."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle import internals, state
from mtrain.core.interfaces import Array
from mtrain.core.interfaces.program import Program, ProgramInput
from mtrain.core.overriding import override
from mtrain.errors import MtrainError, SpecError


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


class _Own(Layer):
    """A user's own layer, whose input is a list of the arrays of a batch."""

    def __init__(self, network: Layer, inputs: Sequence[ProgramInput], left_out: Sequence[ProgramInput] = ()) -> None:
        """``left_out``: inputs on which no output depends. The layer may still look for them in its batch: they are zeros."""
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.left_out = left_out
        self.names: list[str] = []

    @override
    def forward(self, arrays: list[Tensor]) -> tuple[Tensor, ...]:
        return self.predict(arrays)  # Paddle rewrites the code of this method, and of no other of mtrain's

    def predict(self, arrays: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the predictions for a batch, and note their names."""
        batch = {given.key: array for given, array in zip(self.inputs, arrays, strict=True)}
        for given in self.left_out:
            dtype: Any = given.dtype
            batch[given.key] = paddle.zeros(given.example.shape, dtype)
        outputs: dict[str, Tensor] = self.network(batch)
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
        return self.detect(image, scale_factor)  # Paddle rewrites the code of this method, and of no other

    def detect(self, image: Tensor, scale_factor: Tensor) -> tuple[Tensor, Tensor]:
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
        return internals.suppress_boxes(boxes_BN4, paddle.transpose(scores_BNC, (0, 2, 1)), self.settings)


def write(network: Layer, weights: Mapping[str, Array], program: Program) -> list[str]:
    """Write a network with ``weights`` as a program; return the names of its outputs, in order.

    Raises:
        SpecError: The network cannot be traced, or is mtrain's and reads several arrays.
    """
    is_own = program.inputs[0].example is not None
    if len(program.inputs) != 1 and not is_own:
        keys = ", ".join(given.key for given in program.inputs)
        raise SpecError(
            f"--format paddle: takes models that read one array of a batch, this one reads {keys}; use onnx"
        )
    state.fill(network.state_dict(), weights, what="weights")
    _leave_own_code()
    if is_own:
        return _own_written(network, program)
    traced: Any = _Traced(network, program)
    inputs = _inputs(program)
    if program.suppression:
        traced = _Detector(traced, program.suppression)
        inputs[0].name = "image"
        inputs.append(paddle.static.InputSpec([program.batch or -1, 2], "float32", "scale_factor"))
    traced.eval()
    with _explain_refusal(program):
        saved = paddle.jit.to_static(traced, input_spec=inputs, full_graph=True)
        paddle.jit.save(saved, str(program.path))
    return list(traced.names)


def _own_written(network: Layer, program: Program) -> list[str]:
    """Write a user's own layer as a program whose inputs are those on which its predictions depend.

    Raises:
        SpecError: There is none, or the layer cannot be traced.
    """
    version = str(paddle.version.full_version)
    # Paddle 2 does not tell which inputs a traced program reads.
    if version.startswith("2."):
        raise SpecError(f"--format paddle: own models are exported with Paddle 3, and this is {version}")
    with _explain_refusal(program):
        static = _static(_Own(network, program.inputs), program)
        # A batch of a user's own data holds targets too, and Paddle saves no program with an input that is not read.
        names = internals.inputs_read(static)
        read = [given for given in program.inputs if given.name in names]
        if not read:
            raise SpecError("the model's predictions depend on no array of a batch, so there is nothing to export")
        if len(read) < len(program.inputs):
            unread = [given for given in program.inputs if given.name not in names]
            static = _static(_Own(network, read, unread), replace(program, inputs=read))
        paddle.jit.save(static, str(program.path))
    return list(static.names)


def _static(traced: _Own, program: Program) -> Any:
    traced.eval()
    return paddle.jit.to_static(traced, input_spec=[_inputs(program)], full_graph=True)


def _leave_own_code() -> None:
    """Keep Paddle from rewriting mtrain's Python code when it traces, as it does not know all of it.

    Nothing of mtrain's needs that: which branch runs depends on no value of a tensor.
    """
    paddle.jit.ignore_module(
        [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("mtrain", "mtrain_deploy")]
    )


@contextmanager
def _explain_refusal(program: Program) -> Iterator[None]:
    """Say in one sentence that a network cannot be traced.

    Raises:
        SpecError: It cannot.
    """
    try:
        yield
    except MtrainError:
        raise
    except Exception as error:  # a network may do anything that cannot be traced
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        advice = "" if program.batch else "; --batch-size N, a fixed one, may help"
        raise SpecError(
            f"the model cannot be exported: Paddle could not trace it ({lines[-1].strip()[:300]}){advice}"
        ) from error


def _inputs(program: Program) -> list[Any]:
    """Return the description of each input; -1 is an axis of any size."""
    specs = []
    for given in program.inputs:
        shape = [program.batch or -1, *given.shape] if given.batched else list(given.example.shape)
        for axis in given.sides if program.size_step else ():
            shape[axis] = -1
        dtype: Any = given.dtype
        specs.append(paddle.static.InputSpec(shape, dtype, given.name or given.key))
    return specs
