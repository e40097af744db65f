"""One interface to all stages of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): parts of weights and of gradients.

DeepSpeed splits arrays, sums gradients over ranks and distributes updated weights. mtrain's update rule, clipping and
average work on the parts that DeepSpeed leaves on a rank. ``internals`` reads and writes them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mtrain.backends._deepspeed import internals
from mtrain.backends._torch.sharded.shards import Part, spans_of
from mtrain.backends.engine import have_gradients
from mtrain.errors import SpecError


class Zero(Protocol):
    """A model that DeepSpeed manages, in one of the stages of ZeRO."""

    parts: dict[str, Part]
    """The split arrays by name: none in stage 0, trained weights in stages 1 and 2, all weights in stage 3."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the averaged gradients; the rule may change them in place."""
        ...

    def release(self) -> None:
        """Drop whole copies of split weights, so that the parts can be written; ``publish`` must follow."""
        ...

    def publish(self) -> None:
        """Update the model from the parts of all ranks; every rank must call, outside of an update."""
        ...


def engine_of(model: nn.Module, trained: Sequence[nn.Parameter], settings: dict[str, Any]) -> Any:
    """Make DeepSpeed's engine around ``model``; ``trained`` are the parameters with a gradient."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=_EmptyOptimizer(trained), config=settings)
    return engine


class _EmptyOptimizer(torch.optim.Optimizer):
    """The optimizer that DeepSpeed insists on; it does nothing, because mtrain's rule has changed the parts before."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        super().__init__(list(trained), {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        """Do nothing: the rule was applied to the parts already."""


class WholeWeights:
    """A model in stage 0, where nothing is split."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def gradients(self) -> Mapping[str, Tensor]:
        """Return nothing: whole gradients are where autograd puts them."""
        return {}

    def release(self) -> None:
        """Do nothing: there are no parts."""

    def publish(self) -> None:
        """Do nothing: there are no parts."""


class SplitStates:
    """A model in stage 1 or 2, where every rank has whole weights and an equal share of a flat float32 copy of them."""

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int, size: int) -> None:
        """Find this rank's parts in ``zero``, DeepSpeed's optimizer; ``names`` maps ``id(parameter)`` to its name."""
        self._zero = zero
        self.parts: dict[str, Part] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for group, share in enumerate(internals.shares(zero)):
            length = share.memory.numel()
            for parameter, offset in zip(share.parameters, share.offsets, strict=True):
                spans = spans_of(parameter.numel(), [length * r - offset for r in range(size + 1)])
                first, end = spans[rank]
                place = offset + first - length * rank if first < end else 0
                name = names[id(parameter)]
                self._places[name] = (group, place)
                self.parts[name] = Part(tuple(parameter.shape), spans, share.memory[place : place + end - first])

    def gradients(self) -> Mapping[str, Tensor]:
        """See ``Zero.gradients``."""
        flats = internals.share_gradients(self._zero)
        gradients = {}
        for name, (group, place) in self._places.items():
            gradients[name] = flats[group][place : place + self.parts[name].local.numel()]
        return gradients

    def release(self) -> None:
        """Do nothing: parts can be written at any time, whole weights are copies of them."""

    def publish(self) -> None:
        """See ``Zero.publish``."""
        internals.publish_shares(self._zero)


class SplitWeights:
    """A model in stage 3, where each rank has an equal share of each weight."""

    def __init__(self, zero: Any, model: nn.Module, rank: int, size: int) -> None:
        self._zero = zero
        self.parts: dict[str, Part] = {}
        self._slices: dict[str, internals.Slice] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for piece in internals.slices(zero):
            name = names[id(piece.parameter)]
            self._slices[name] = piece
            self.parts[name] = _part_of(piece.parameter, piece.memory, rank, size)
        for name, frozen in model.named_parameters():
            if name not in self.parts:
                self.parts[name] = _part_of(frozen, internals.frozen_slice(frozen), rank, size)

    def gradients(self) -> Mapping[str, Tensor]:
        """See ``Zero.gradients``."""
        return {
            name: internals.slice_gradient(self._zero, piece, length=self.parts[name].local.numel())
            for name, piece in self._slices.items()
        }

    def release(self) -> None:
        """See ``Zero.release``."""
        internals.drop_whole_weights(self._zero)

    def publish(self) -> None:
        """See ``Zero.publish``."""
        internals.publish_slices(self._zero)


def _part_of(parameter: Any, memory: Tensor, rank: int, size: int) -> Part:
    length = internals.slice_length(parameter)
    spans = spans_of(internals.whole_numel(parameter), [length * r for r in range(size + 1)])
    first, end = spans[rank]
    return Part(internals.whole_shape(parameter), spans, memory[: end - first])


class ZeroExchange:
    """The ``Exchange`` of DeepSpeed, which sums gradients over ranks; each part then gets its part of the gradient.

    With ``reduction`` "update" gradients are summed once, after the last backward pass, from whole gradients and in the
    order of ddp. With "micro_batch" they are summed in every backward pass, as DeepSpeed does by default: stages 2 and
    3 then hold only parts of gradients, every parameter must take part in every backward pass on every rank, and with
    accumulation sums are rounded differently.
    """

    def __init__(
        self,
        engine: Any,
        zero: Zero,
        trained: Mapping[str, nn.Parameter],
        collective: Any,
        reduction: Literal["update", "micro_batch"],
    ) -> None:
        self._engine = engine
        self._zero = zero
        self._trained = trained
        self._collective = collective
        self._once = reduction == "update"
        self._open: ExitStack | None = None

    @property
    def _has_parts(self) -> bool:
        return bool(self._zero.parts)

    def during(self, *, last: bool) -> nullcontext[None]:
        """Prepare DeepSpeed for forward and backward of a micro batch."""
        if self._has_parts:
            internals.before_forward(self._engine)
        if not self._once:
            self._engine.set_gradient_accumulation_boundary(last)
        elif self._open is None:
            self._open = ExitStack()
            if self._has_parts:
                self._open.enter_context(self._engine.coalesce_grad_reduction())
            else:
                self._engine.set_gradient_accumulation_boundary(False)
        return nullcontext()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of a loss that is already divided by the accumulation and scaled."""
        if self._has_parts:
            internals.before_backward(self._engine)
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def backward_alone(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of this model alone, as long as none is exchanged; see ``Recipe.own_order``.

        DeepSpeed's backward pass has no choice of parameters: another model through which the loss goes would get gradients.
        Until they are exchanged, gradients are whole and lie on the parameters, so it need not know of this pass.

        Raises:
            SpecError: The graph is kept for a second pass, in which stage 3 would not gather the weights again.
        """
        if retain_graph and isinstance(self._zero, SplitWeights):
            raise SpecError(
                "optimizer.backward: retain_graph=True, or session.backward with several models, goes through one graph twice, which "
                "backend.options.stage 3 cannot: it drops whole weights after the first pass; call the model again for the second loss, or "
                "use stage 0, 1 or 2"
            )
        trained = list(self._trained.values())
        gradients = torch.autograd.grad(loss, trained, retain_graph=retain_graph, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                _add_gradient(parameter, gradient)

    def finish(self) -> None:
        """Complete the exchange: when this returns, gradients are averaged and set as ``grad`` of the parts.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of
        one rank.
        """
        absent = self._complete() if self._once else []
        if self._open is not None:
            self._open.close()
            self._open = None
        if self._once and not self._has_parts:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
            for name in absent:
                self._trained[name].grad = None
        for name, grad in self._zero.gradients().items():
            if name in absent:
                grad.zero_()
            else:
                self._zero.parts[name].local.grad = grad

    def _complete(self) -> list[str]:
        """Add zero gradients where only other ranks have one; return the names for which no rank has a gradient."""
        any_rank_flags = have_gradients(list(self._trained.values()), self._collective)
        absent = []
        for (name, parameter), on_any_rank in zip(self._trained.items(), any_rank_flags, strict=True):
            if not on_any_rank:
                absent.append(name)
            elif parameter.grad is None:
                _give_zeros(parameter)
        return absent

    def abandon(self) -> None:
        """Abandon an update that has begun, without exchanging anything."""
        if self._open is not None:
            internals.abandon_reduction(self._engine)
            self._open.close()
            self._open = None

    def publish(self) -> None:
        """Let DeepSpeed distribute the new weights after the rule was applied, and get ready for the next update."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()


def _give_zeros(parameter: Any) -> None:
    """Set a zero gradient in the shape of the whole parameter, of which a rank holds only a part in stage 3."""
    _add_gradient(parameter, parameter.data.new_zeros(internals.whole_shape(parameter)))


def _add_gradient(parameter: Any, gradient: Tensor) -> None:
    """Add ``gradient``, in the shape of the whole parameter, to that of a parameter of which a rank may hold only a part."""
    former = parameter.grad
    if tuple(parameter.shape) == tuple(gradient.shape):
        own = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        parameter.grad = own if former is None else former + own
        return
    # torch accepts a gradient only in the shape of the parameter, so the parameter is whole for a moment.
    part = parameter.data
    parameter.data = part.new_empty(gradient.shape)
    parameter.grad = gradient.clone() if former is None else former + gradient
    parameter.data = part
