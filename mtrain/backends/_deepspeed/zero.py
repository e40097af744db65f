"""The stages of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) behind one face: parts of weights and of their gradients.

DeepSpeed cuts arrays, sums gradients over ranks and sends updated weights round. The update rule, clipping and the average
work on the parts that it leaves to a rank.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mtrain.backends._torch.shards import Part, spans_of


class Zero(Protocol):
    """One model in the hands of DeepSpeed."""

    parts: dict[str, Part]
    """What is split, by name: trained weights from stage 1 on, all weights in stage 3."""

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's parts of the averaged gradients, to be changed in place until ``finish_update``."""
        ...

    def release(self) -> None:
        """No split weight is whole any more, so that parts can be written; ``publish`` follows."""
        ...

    def publish(self) -> None:
        """The model holds what the parts of all ranks hold; every rank calls, outside of an update."""
        ...


def engine_of(model: nn.Module, trained: Sequence[nn.Parameter], settings: dict[str, Any]) -> Any:
    """DeepSpeed's engine around ``model``."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=_Published(trained), config=settings)
    return engine


class _Published(torch.optim.Optimizer):
    """The optimizer that DeepSpeed asks for: when it is called, the rule has been applied to the parts."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        super().__init__(list(trained), {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


class WholeWeights:
    """Stage 0: nothing is split."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def gradients(self) -> Mapping[str, Tensor]:
        """Nothing: they are where autograd puts them."""
        return {}

    def release(self) -> None:
        """Nothing."""

    def publish(self) -> None:
        """Nothing."""


class SplitStates:
    """Stages 1 and 2: whole weights on every rank, and one flat float32 array of which each rank has an equal share."""

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int, size: int) -> None:
        """``names``: of parameters, by ``id``."""
        self._zero = zero
        self.parts: dict[str, Part] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            flat = zero.single_partition_of_fp32_groups[group].detach()
            share = flat.numel()
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                spans = spans_of(parameter.numel(), [share * r - offset for r in range(size + 1)])
                first, end = spans[rank]
                place = offset + first - share * rank if first < end else 0
                name = names[id(parameter)]
                self._places[name] = (group, place)
                self.parts[name] = Part(tuple(parameter.shape), spans, flat[place : place + end - first])

    def gradients(self) -> Mapping[str, Tensor]:
        """See ``Zero.gradients``."""
        zero = self._zero
        flats = []
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            if zero.cpu_offload:
                flats.append(master.grad)
                continue
            flat = zero.flatten(zero.averaged_gradients[group])
            assert flat.numel() == master.numel()
            zero.averaged_gradients[group] = [flat]
            flats.append(flat)
        found = {}
        for name, (group, place) in self._places.items():
            found[name] = flats[group][place : place + self.parts[name].held.numel()]
        return found

    def release(self) -> None:
        """Nothing: whole weights are copies of the parts."""

    def publish(self) -> None:
        """See ``Zero.publish``."""
        self._zero.update_lp_params()


class SplitWeights:
    """Stage 3: each rank has an equal share of each weight."""

    def __init__(self, zero: Any, model: nn.Module, rank: int, size: int) -> None:
        self._zero = zero
        self.parts: dict[str, Part] = {}
        self._places: dict[str, tuple[int, int]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group, parameters in enumerate(zero.fp16_groups):
            flat = zero.fp32_partitioned_groups_flat[group].detach()
            shares = [parameter.partition_numel() for parameter in parameters]
            for parameter, place in zip(parameters, accumulate([0, *shares[:-1]]), strict=True):
                name = names[id(parameter)]
                self._places[name] = (group, place)
                self.parts[name] = _part_of(parameter, flat[place:], rank, size)
        frozen: Any
        for name, frozen in model.named_parameters():
            if name not in self.parts:
                self.parts[name] = _part_of(frozen, frozen.ds_tensor.detach(), rank, size)

    def gradients(self) -> Mapping[str, Tensor]:
        """See ``Zero.gradients``."""
        found = {}
        offloaded = self._zero.offload_optimizer
        for group, parameters in enumerate(self._zero.fp16_groups):
            for i, parameter in enumerate(parameters):
                name = self._zero.param_names[parameter]
                length = self.parts[name].held.numel()
                if offloaded:
                    place = self._places[name][1]
                    found[name] = self._zero.fp32_partitioned_groups_flat[group].grad[place : place + length]
                else:
                    found[name] = self._zero.averaged_gradients[group][i].view(-1)[:length]
        return found

    def release(self) -> None:
        """See ``Zero.release``."""
        self._zero._partition_all_parameters()

    def publish(self) -> None:
        """See ``Zero.publish``."""
        self.release()
        zero = self._zero
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _part_of(parameter: Any, memory: Tensor, rank: int, size: int) -> Part:
    share = parameter.partition_numel()
    spans = spans_of(parameter.ds_numel, [share * r for r in range(size + 1)])
    first, end = spans[rank]
    return Part(tuple(parameter.ds_shape), spans, memory[: end - first])


class ZeroExchange:
    """``Exchange``: gradients of an update are summed over ranks by DeepSpeed, and laid under the parts.

    ``reduction`` "update": once, behind the last backward pass, from whole gradients, which are added up in the order of
    ddp. "micro_batch": in every backward pass, as DeepSpeed does by itself; stages 2 and 3 then hold parts of gradients
    only, every parameter must take part in every backward pass on every rank, and with accumulation sums are rounded
    differently.
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
    def _split(self) -> bool:
        return bool(self._zero.parts)

    def during(self, *, last: bool) -> nullcontext[None]:
        """Surrounds forward and backward of a micro batch."""
        if self._split:
            self._engine.optimizer.clear_backward_seen_flag()
        if not self._once:
            self._engine.set_gradient_accumulation_boundary(last)
        elif self._open is None:
            self._open = ExitStack()
            if self._split:
                self._open.enter_context(self._engine.coalesce_grad_reduction())
            else:
                self._engine.set_gradient_accumulation_boundary(False)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backward pass of a loss that is divided and scaled already."""
        if self._split:
            self._engine.optimizer.backward_prologue()
            self._engine.optimizer.enter_backward()
        self._engine.backward(loss, scale_wrt_gas=False)

    def finish(self) -> None:
        """Gradients are averaged, and under the parts, when this returns.

        One that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of one rank.
        """
        absent = self._complete() if self._once else []
        if self._open is not None:
            self._open.close()
            self._open = None
        if self._once and not self._split:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
            for name in absent:
                self._trained[name].grad = None
        for name, grad in self._zero.gradients().items():
            if name in absent:
                grad.zero_()
            else:
                self._zero.parts[name].held.grad = grad

    def _complete(self) -> list[str]:
        """Give this rank zeros where only others have a gradient. Returns the names of which none has one."""
        present = torch.tensor([float(p.grad is not None) for p in self._trained.values()])
        anywhere = self._collective.all_reduce(present.numpy(), "max").tolist()
        absent = []
        for (name, parameter), found in zip(self._trained.items(), anywhere, strict=True):
            if not found:
                absent.append(name)
            elif parameter.grad is None:
                _give_zeros(parameter)
        return absent

    def abandon(self) -> None:
        """Give up an update that is under way: nothing is exchanged any more."""
        if self._open is not None:
            self._engine._flush_coalesced_reduction_zero12 = self._engine._flush_coalesced_reduction_zero3 = _nothing
            self._open.close()
            self._open = None

    def publish(self) -> None:
        """Behind the rule: DeepSpeed sends the new weights round and is ready for the next update."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()


def _nothing(zero: Any) -> None:
    """In place of what DeepSpeed does when an update is complete."""


def _give_zeros(parameter: Any) -> None:
    """A gradient of zeros of the shape of the whole parameter, which in stage 3 is not here."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if parameter.shape == shape:
        parameter.grad = torch.zeros_like(parameter)
        return
    held = parameter.data
    parameter.data = held.new_zeros(shape)
    parameter.grad = torch.zeros_like(parameter.data)
    parameter.data = held
