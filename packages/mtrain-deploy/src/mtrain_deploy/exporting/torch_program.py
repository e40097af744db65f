"""Write a model as an ONNX graph or as a program of ``torch.export``, in evaluation mode."""

import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.backends._torch import state
from mtrain.core.interfaces import Array
from mtrain.core.interfaces.program import Program, ProgramInput
from mtrain.errors import MtrainError, SpecError, UsageError
from mtrain.spec import remedies

NAMES = "mtrain.json"
"""Extra file of a program of ``torch.export``: the names of its ``inputs`` and ``outputs``, in order."""
# torch takes a size of 1 for a constant.
_EXAMPLES = 2
"""Samples in the example batch of a program for any batch."""


class _Traced(nn.Module):
    """A network whose inputs and outputs are tensors in order, as a graph has them."""

    def __init__(self, network: nn.Module, program: Program) -> None:
        super().__init__()
        self.network = network
        self.program = program
        self.inputs = list(program.inputs)
        self.raw = program.raw
        self.names: list[str] = []
        self.left_out: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Inputs that no output depends on. The network may still look for them in its batch, so they are zeros there."""

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        batch = {given.key: _as_loaded(array, given) for given, array in zip(self.inputs, arrays, strict=True)}
        batch |= {key: torch.zeros(shape, dtype=kind) for key, (shape, kind) in self.left_out.items()}
        outputs: dict[str, Tensor] = self.network.raw(batch) if self.raw else self.network(batch)  # type: ignore[operator]
        self.names = list(outputs)
        return tuple(value.float() if value.dtype == torch.float16 else value for value in outputs.values())


def _as_loaded(array: Tensor, given: ProgramInput) -> Tensor:
    """Return an input as mtrain's loaders have it: images with the channels last and pixels from 0 to 255."""
    if given.layout == "CHW":
        array = array.permute(0, 2, 3, 1)
    return array * 255 if given.layout and given.dtype == "float32" else array


def write(network: nn.Module, weights: Mapping[str, Array], program: Program) -> list[str]:
    """Write a network with ``weights`` as a program; return the names of its outputs, in order.

    Raises:
        SpecError: The network cannot be traced.
        UsageError: ONNX's packages are not installed.
    """
    state.fill(network.state_dict(), weights, what="weights")
    network.requires_grad_(requires_grad=False)  # what runs the program need not switch gradients off
    if program.half:
        network.half()
    traced = _Traced(network, program).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter about its own parts
        exported = _export(traced)
        if program.format == "torch":
            exported = _without_unread(exported, traced)
            named = {"inputs": [given.name or given.key for given in traced.inputs], "outputs": traced.names}
            torch.export.save(exported, program.path, extra_files={NAMES: json.dumps(named)})
        else:
            _write_onnx(exported, program, names=traced.names)
    return traced.names


def _without_unread(exported: Any, traced: _Traced) -> Any:
    """Return the program without the inputs that no output depends on: a batch of a user's own data holds targets too.

    Raises:
        SpecError: No input is left.
    """
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    read = [bool(nodes[name].users) for name in exported.graph_signature.user_inputs]
    if all(read):
        return exported
    if not any(read):
        raise SpecError("the model's predictions depend on no array of a batch, so there is nothing to export")
    examples = {given.key: _example(given, traced.program) for given in compress(traced.inputs, map(not_, read))}
    traced.left_out = {key: (example.shape, example.dtype) for key, example in examples.items()}
    traced.inputs = list(compress(traced.inputs, read))
    return _export(traced)


def _export(traced: _Traced) -> Any:
    program = replace(traced.program, inputs=traced.inputs)
    examples = tuple(_example(given, program) for given in program.inputs)
    try:
        traced(*examples)  # notes the names of the outputs
        exported = torch.export.export(traced, examples, dynamic_shapes=(_axes(program),), strict=False)
    except MtrainError:
        raise
    except Exception as error:  # a network may do anything that cannot be traced
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SpecError(f"the model cannot be exported: torch.export could not trace it ({reason[:300]})") from error
    _forget_source(exported)
    return exported


def _forget_source(exported: Any) -> None:
    """Remove the lines of source code, with the paths of their files, that torch notes for each node of a graph."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # Both kinds of files would carry these lines to whoever gets the model.
            node.meta.pop("stack_trace", None)


def _example(given: ProgramInput, program: Program) -> Tensor:
    if given.example is not None:
        return torch.from_numpy(given.example)
    kind: torch.dtype = getattr(torch, given.dtype)
    return torch.zeros((program.batch or _EXAMPLES, *given.shape), dtype=kind)


def _axes(program: Program) -> tuple[dict[int, Any], ...]:
    """Return, for each input, the axes that may have any size."""
    axes: dict[int, Any] = {}
    if program.batch is None:
        axes[0] = torch.export.Dim("batch")
    step = program.size_step
    sides: tuple[Any, ...] = ()
    if step:
        # Named in steps, so that the graph knows that feature maps of several scales fit together.
        names = ("height", "width")
        sides = tuple(step * torch.export.Dim(name) if step > 1 else torch.export.Dim.DYNAMIC for name in names)
    return tuple(
        {**(axes if given.batched else {}), **dict(zip(given.sides, sides, strict=False))} for given in program.inputs
    )


def _write_onnx(exported: Any, program: Program, *, names: Sequence[str]) -> None:
    try:
        import onnxscript  # noqa: F401  # torch's exporter needs it, and says so less clearly
    except ImportError:
        raise UsageError(
            f"--format onnx needs onnx and onnxscript; install them with: {remedies.install('mtrain-deploy', python=sys.executable)}"
        ) from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        graph = torch.onnx.export(
            exported,
            dynamo=True,
            input_names=[given.name or given.key for given in program.inputs],
            output_names=list(names),
            opset_version=program.opset,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:  # torch 2.6 cannot translate a BatchNorm of a program for inference
        raise SpecError(
            f"--format onnx: torch {torch.__version__} cannot write this network as ONNX ({str(error).partition('.')[0]}); use a "
            "newer torch (docs/versions.md), or --format torch"
        ) from error
    assert graph is not None
    graph.save(program.path, external_data=False)
