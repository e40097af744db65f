"""Let the ranks of a tensor group share the layers of a model, through torch's ``parallelize_module``."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mtrain.core.overriding import override
from mtrain.errors import SpecError
from mtrain_language.meshes.sequence import TEXT_AXIS
from mtrain_language.meshes.tensor_plan import Style, has_inputs_first, ties, weight_axis

ROUNDING = 1e-3
"""Largest difference of outputs, relative to the largest one, that counts as rounding."""
FAILURES = (RuntimeError, ValueError)
"""What a model raises whose shapes do not fit."""


class TransposedParallel(ParallelStyle):
    """Shares transformers' ``Conv1D``, whose weight has the axes (inputs, outputs)."""

    def __init__(self, style: str, *, output: Placement) -> None:
        super().__init__()
        self._style = style
        self._output = output

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        by_rows = self._style in ("rowwise", "rowwise_split_input")
        given: Placement = Shard(-1) if self._style == "rowwise" else Replicate()
        wanted: Placement = Shard(-1) if by_rows else Replicate()

        def cut(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(part.named_parameters(recurse=False)):
                axis = weight_axis(part, self._style) if key == "weight" else 0
                placement: Placement = Replicate() if by_rows and key == "bias" else Shard(axis)
                placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
                part.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))

        def enter(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
            x = inputs[0]
            placed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [given], run_check=False)
            return placed.redistribute(placements=[wanted])

        def leave(part: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
            local: Tensor = output.redistribute(placements=[self._output]).to_local()
            return local

        return distribute_module(module, device_mesh, cut, enter, leave)  # type: ignore[arg-type]


def _rowwise(module: nn.Module, given: Placement, output: Placement) -> ParallelStyle:
    return RowwiseParallel(input_layouts=given, output_layouts=output)


def _colwise(module: nn.Module, output: Placement, given: Placement) -> ParallelStyle:
    return ColwiseParallel(input_layouts=given, output_layouts=output)


_MADE: Mapping[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": partial(_colwise, output=Shard(-1), given=Replicate()),
    "colwise_gather_output": partial(_colwise, output=Replicate(), given=Replicate()),
    "rowwise": partial(_rowwise, given=Shard(-1), output=Replicate()),
    "rowwise_split_input": partial(_rowwise, given=Replicate(), output=Replicate()),
    "embedding_rowwise": partial(_rowwise, given=Replicate(), output=Replicate()),
}


def share(
    model: nn.Module,
    plan: Mapping[str, Style],
    tensor: DeviceMesh,
    *,
    sequence: bool = False,
    split: Collection[str] = (),
) -> None:
    """Leave this rank of a tensor group its part of the layers of ``plan``, in place.

    Weights that several layers have stay one.

    Args:
        model: The model.
        plan: Styles of layers by name.
        tensor: The ranks of this one's tensor group.
        sequence: Outputs of layers that are cut by rows are parts of texts, see ``sequence.share_texts``.
        split: Layers whose outputs are not gathered, although their style says so; see ``vocabulary``.

    Raises:
        SpecError: A layer is of a kind that cannot be shared.
    """
    tied = ties(model)
    for name, style in plan.items():
        if style != "grad_allreduce":
            module = model.get_submodule(name)
            style = "colwise" if name in split else style
            chosen = (
                _check_known(name, style)
                if isinstance(style, ParallelStyle)
                else _make_style(name, module, style, sequence=sequence)
            )
            parallelize_module(module, tensor, chosen, src_data_rank=None)
    for places in tied:
        _, first, key = places[0]
        for _, module, other in places[1:]:
            module.register_parameter(other, first._parameters[key])


def _check_known(name: str, style: ParallelStyle) -> ParallelStyle:
    """Return a style of torch's own. Of another one, what it does to values would be lost: layers are shared without them."""
    if type(style).__module__.partition(".")[0] != "torch":
        raise SpecError(
            f"parallelize_plan: {name} is to be shared by {type(style).__name__}, a class of its own; give a name such as colwise, or a "
            "style of torch.distributed.tensor.parallel"
        )
    return style


def _make_style(name: str, module: nn.Module, style: str, *, sequence: bool) -> ParallelStyle:
    """Return torch's style for a layer."""
    if has_inputs_first(module):
        outputs = {"colwise": Shard(-1)}
        return TransposedParallel(style, output=outputs.get(style, Replicate()))
    wanted = nn.Embedding if style == "embedding_rowwise" else nn.Linear
    if not isinstance(module, wanted):
        raise SpecError(
            f"parallel.plan: {name} is to be shared as {style}, but is a {type(module).__name__}; only {wanted.__name__} can be: "
            "give a plan without it"
        )
    if sequence and style == "rowwise":
        return _rowwise(module, Shard(-1), Shard(TEXT_AXIS))
    return _MADE[style](module)


def find_reduced_alone(model: nn.Module, plan: Mapping[str, Style]) -> list[str]:
    """Return the parameters of which each rank of a tensor group has a part of the gradient, to be added up."""
    layers = {name for name, style in plan.items() if style == "grad_allreduce"}
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in layers]


def short_length(ranks: int) -> int:
    """Return how many tokens models are compared on: 16, or the next number that the ``ranks`` of a tensor group divide."""
    return -(-16 // ranks) * ranks


def short_text(model: nn.Module, device: torch.device, length: int) -> Tensor | None:
    """Return tokens, (1, length), for a language model of transformers; None: it is no such model."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int) or not hasattr(model, "tp_plan"):
        return None
    return (7 * torch.arange(length, device=device) + 3).view(1, -1) % vocabulary


@contextmanager
def full_products() -> Iterator[None]:
    """Compute products on CUDA in float32 and not in TensorFloat-32, whose rounding would pass for another model."""
    matmul = torch.backends.cuda.matmul
    former, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32 = former


@torch.no_grad()
def output_of(model: nn.Module, *, length: int) -> Tensor | None:
    """Return what a language model of transformers computes for ``length`` tokens; None: it is no such model."""
    tokens = short_text(model, next(model.parameters()).device, length)
    if tokens is None:
        return None
    was_training = model.training
    model.eval()
    try:
        with full_products():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.train(was_training)
    return logits.double()


def check_same(model: nn.Module, expected: Tensor) -> None:
    """Refuse a plan after which the model computes something else than before; every rank must call.

    Args:
        model: The model, split over the ranks.
        expected: What it has computed before, see ``output_of``.

    Raises:
        SpecError: It does.
    """
    problem = ""
    try:
        shared = output_of(model, length=expected.shape[1])
        assert shared is not None
        worst = float((shared - expected.to(shared.device)).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not worst <= ROUNDING:
            problem = f"its outputs differ by {worst:.1e}"
    except FAILURES as error:
        problem = first_line(error)
    if problem:
        raise SpecError(not_the_same(problem))


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, or of a model's own code."""
    return str(error).partition("\n")[0]


def not_the_same(problem: str) -> str:
    """Return the refusal of a plan after which a model computes something else."""
    return (
        f"parallel.plan: with its layers shared like this the model does not compute what it computes alone ({problem}); layers that "
        "hold several matrices in one, such as GPT-2's attention, cannot be cut by columns: leave them out of the plan"
    )
