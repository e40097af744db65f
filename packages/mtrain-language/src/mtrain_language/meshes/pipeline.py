"""One stage of a pipeline: it computes micro batches by torch's 1F1B schedule, and evaluates them one after the other.

The training loop asks for one micro batch at a time. They are kept, and all of an update are computed when the backward pass of
the last one is asked for. Losses are known then, on every stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from mtrain.backends._fsdp.units import Unit
from mtrain.backends._torch import precision
from mtrain.core.interfaces import Precision
from mtrain.core.overriding import override
from mtrain.errors import SpecError
from mtrain_language.meshes.stages import Division
from mtrain_language.meshes.tensor_styles import FAILURES, ROUNDING, first_line, full_products, short_text

_SEEDS = 0x9E3779B97F4A7C15
"""Distance of the seeds of two stages."""
Batch = Mapping[str, Tensor]


class Later:
    """A number of a micro batch that is known once its update has been computed, times a factor."""

    def __init__(self, known: list[float], factor: float = 1.0) -> None:
        """``known``: holds the number once it is known."""
        self._check_known = known
        self.factor = factor

    def __mul__(self, factor: float) -> "Later":
        return Later(self._check_known, self.factor * factor)

    def __float__(self) -> float:
        (number,) = self._check_known
        return number * self.factor

    def __add__(self, other: Any) -> float:
        return float(self) + float(other)

    __radd__ = __add__

    def detach(self) -> "Later":
        """Return itself: it has no graph."""
        return self


class Stage(nn.Module):
    """The weights of a stage, for FSDP to split, and the pass of a micro batch through it."""

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        *,
        number: int,
        precision: Precision,
        group: dist.ProcessGroup,
    ) -> None:
        """Take the parts of ``model`` that stage ``number`` holds; see ``stages.keep``."""
        super().__init__()
        self.number, self.count = number, len(division.parts)
        self.group = group
        self.width = division.width
        """Numbers of each token that stages hand on."""
        self.parts = nn.ModuleList(model.get_submodule(name) for name in division.parts[number])
        own = division.blocks[number]
        self._model = (model,)  # not a submodule: it has the other stages' weights too
        self._compute = model.forward
        self._blocks = [model.get_submodule(name) for name in own]
        self._precision = precision
        self._ties = [names[0] for names in division.ties if number in division.holders[names[0]]]
        self._given: Tensor | None = None
        self._left: Tensor | None = None
        self._is_checked = False
        self.results: list[dict[str, Tensor]] = []
        """What the model returned for each micro batch since it was cleared."""

    @property
    def model(self) -> nn.Module:
        """The whole model, with weights of this stage alone."""
        return self._model[0]

    @property
    def is_last(self) -> bool:
        """Whether this stage knows the loss."""
        return self.number == self.count - 1

    def units(self, unit: Unit) -> list[nn.Module]:
        """Return what FSDP gathers at a time: each block, and any other part that is at least as large."""
        least = min(_size(block) for block in self._blocks)
        return [] if unit == "model" else [part for part in self.parts if _size(part) >= least]

    def watch(self) -> None:
        """Exchange hidden states with the other stages where the model hands them from block to block.

        FSDP must have split the weights: its hooks must see what comes from another stage.
        """
        if self.number:
            self._blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if not self.is_last:
            self._blocks[-1].register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        own = inputs[0] if inputs else keywords["hidden_states"]
        if self._given is None:
            self._given = torch.empty_like(own, memory_format=torch.contiguous_format)
            dist.recv(self._given, group=self.group, group_src=self.number - 1)
        self.entered = (tuple(self._given.shape), self._given.dtype)
        if inputs:
            return (self._given, *inputs[1:]), keywords
        return inputs, {**keywords, "hidden_states": self._given}

    def _leave(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._left = output
        self.left = (tuple(output.shape), output.dtype)

    @override
    def forward(self, *given: Tensor, **batch: Tensor) -> Tensor:
        """Return the hidden states for the next stage; on the last one in training, the loss."""
        model = self.model
        self._given = given[0] if given else None
        device = next(iter(batch.values())).device
        # What the whole model has computed for the check was not rounded to half precision.
        kind: Precision = "fp32" if self._is_checked else self._precision
        with precision.forward_context(kind, device):
            result = self._compute(**batch, use_cache=False) if self._is_checked else self._compute(batch)
        self._given, left, self._left = None, self._left, None
        if self._is_checked:
            return cast(Tensor, result.logits) if left is None else left
        self.results.append({name: x.detach() for name, x in result.items()})
        if left is not None:
            return left
        return cast(Tensor, result["total"]) if model.training else torch.zeros((), device=device)

    @torch.no_grad()
    def through(self, batch: Batch) -> dict[str, Tensor]:
        """Compute one micro batch on all stages without gradients; return what the last stage returns, on each."""
        self.results.clear()
        hidden = self(**batch)
        if not self.is_last:
            dist.send(hidden.contiguous(), group=self.group, group_dst=self.number + 1)
        found = {name: x.contiguous() for name, x in self.results.pop().items()}
        for x in found.values():
            dist.broadcast(x, group=self.group, group_src=self.count - 1)
        return found

    @torch.no_grad()
    def check_same(self, expected: Tensor | None, *, place: int, shared: bool, device: torch.device) -> None:
        """Refuse a model that computes something else in stages than whole; every rank must call.

        Args:
            expected: What the whole model has computed, see ``tensor_styles.output_of``.
            place: This rank's place in its tensor group, which may have cut the logits.
            shared: Whether there are others in its tensor group.
            device: Where it computes.

        Raises:
            SpecError: It does.
        """
        model = self.model
        tokens = None if expected is None else short_text(model, device, expected.shape[1])
        if expected is None or tokens is None:
            return
        was_training, self._is_checked = model.training, True
        model.eval()
        with full_products():
            output, problem = self._check_output(tokens)
        model.train(was_training)
        self._is_checked = False
        worst = torch.zeros(1, dtype=torch.float64, device=device)
        if self.is_last:
            worst.fill_(torch.nan if output is None else _apart(output, expected.to(device), place=place))
        dist.broadcast(worst, group=self.group, group_src=self.count - 1)
        if not float(worst) <= ROUNDING:
            problem = problem or f"its outputs differ by {float(worst):.1e}"
            if shared:
                problem += (
                    "; its layers are shared, too: with parallel.pipeline=1 it is seen whether the plan is the reason"
                )
            raise SpecError(
                f"parallel.pipeline: {self.count} given, but in stages the model does not compute what it computes whole ({problem}); use "
                "parallel.pipeline=1, with parallel.shard or parallel.tensor"
            )

    def _check_output(self, tokens: Tensor) -> tuple[Tensor | None, str]:
        """Return what this stage computes for ``tokens``, which goes to the next one; None: it, or one before, fails, and why."""
        goes_on, output, problem = torch.ones(1, device=tokens.device), None, ""
        if self.number:
            dist.recv(goes_on, group=self.group, group_src=self.number - 1)
        if goes_on:
            try:
                output = self(input_ids=tokens)
            except (*FAILURES, SpecError) as error:
                problem = first_line(error)
                goes_on.zero_()
        if not self.is_last:
            dist.send(goes_on, group=self.group, group_dst=self.number + 1)
            if output is not None:
                dist.send(output.contiguous(), group=self.group, group_dst=self.number + 1)
        return output, problem

    def add_ties(self, held: Mapping[str, Tensor]) -> None:
        """Add up the gradients of weights that the first and the last stage hold; each gets the same sum."""
        for name in self._ties:
            grad = held[name].grad
            if grad is not None:
                grad += _exchange(grad, self.group, peer=0 if self.is_last else self.count - 1)


def _exchange(own: Tensor, group: dist.ProcessGroup, *, peer: int) -> Tensor:
    other = torch.empty_like(own)
    pair = [
        dist.P2POp(dist.isend, own.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return other


def _apart(output: Tensor, expected: Tensor, *, place: int) -> float:
    """Return the largest difference of logits, of which ``output`` may be the part of this ``place``, relative to the largest one."""
    own = expected
    if output.shape[-1] < expected.shape[-1]:
        own = expected[..., place * output.shape[-1] :][..., : output.shape[-1]]
    return float((output.double() - own).abs().max() / expected.abs().max().clamp(min=1e-30))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Pipeline:
    """The forward pass of a model in stages, as the trainer calls it."""

    def __init__(self, stage: Stage, *, accumulate: int, device: torch.device) -> None:
        """Compute ``accumulate`` micro batches per update."""
        self.stage = stage
        self.device = device
        self._accumulate = accumulate
        self._batches: list[Batch] = []
        self._values: list[dict[str, list[float]]] = []
        self._factors: list[float] = []
        self._names: list[str] = []
        self._schedule: Schedule1F1B | ScheduleGPipe | None = None

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Evaluate a micro batch, or keep it to be trained with the last one of its update."""
        if not (self.stage.model.training and torch.is_grad_enabled()):
            return dict(self.stage.through(batch))
        if self._schedule is None:
            self._prepare(batch)
        self._batches.append(batch)
        self._values.append({name: [] for name in self._names})
        return {name: Later(known) for name, known in self._values[-1].items()}

    def _prepare(self, batch: Batch) -> None:
        """Find the shapes of what stages exchange, by a pass that draws nothing, and make the schedule."""
        stage = self.stage
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._names = list(stage.through(batch))
        first = () if stage.number == 0 else (_like(*stage.entered),)
        output = _like((), torch.float32) if stage.is_last else _like(*stage.left)
        worker = PipelineStage(
            stage,
            stage.number,
            stage.count,
            self.device,
            input_args=first,
            output_args=output,
            group=stage.group,
        )
        # 1F1B needs as many micro batches as stages; with fewer, all go forward before the first goes back anyway.
        kind = Schedule1F1B if self._accumulate >= stage.count else ScheduleGPipe
        self._schedule = kind(worker, self._accumulate, loss_fn=_scale, scale_grads=False)

    def take(self, loss: Any, *, last: bool) -> None:
        """Take the factor of a micro batch's loss; with the last one, compute the gradients of all."""
        self._factors.append(cast(Later, loss).factor)
        if last:
            self._run()

    def _run(self) -> None:
        assert self._schedule is not None, "the forward pass comes first"
        stage = self.stage
        torch.manual_seed((torch.initial_seed() + stage.number * _SEEDS) % 2**63)  # else stages would drop alike
        together: dict[str, Any] = {
            name: torch.cat([batch[name] for batch in self._batches]) for name in self._batches[0]
        }
        factors = torch.tensor(self._factors, dtype=torch.float64, device=self.device)
        stage.results.clear()
        self._schedule.step(target=factors, return_outputs=False, **together)
        found = [[result[name] for name in self._names] for result in stage.results]
        numbers = torch.stack([torch.stack(row) for row in found]).double()
        dist.broadcast(numbers, group=stage.group, group_src=stage.count - 1)
        for values, row in zip(self._values, numbers.tolist(), strict=True):
            for known, number in zip(values.values(), row, strict=True):
                known.append(number)
        self._batches, self._values, self._factors = [], [], []
        stage.results.clear()


def _like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True)


def _scale(loss: Tensor, factor: Tensor) -> Tensor:
    """Return a micro batch's loss as it counts in the gradient of the update."""
    return loss * factor[0]
