"""The memory that one stage of a pipeline needs, counted on a language model without values.

The stage goes through the micro batches of an update as torch's schedule does. With 1F1B it begins with as many forward passes as
there are stages from it to the end, then backward and forward passes take turns; with fewer micro batches than stages (GPipe) all
forward passes come first. Under a schedule, FSDP2 of torch 2.13 leaves weights whole after a backward pass, until the next forward
pass through them; gradients are whole until the end of the update, when they are exchanged unit by unit. What a stage receives has
a piece of memory for each micro batch, which stays.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mtrain.backends._fsdp.units import Unit
from mtrain.core.interfaces import Mesh
from mtrain.core.overriding import override
from mtrain_language.meshes import activations
from mtrain_language.meshes.activations import UNCOUNTED, BatchShapes, Counter, blank
from mtrain_language.meshes.fullest import Held, Schedule
from mtrain_language.meshes.internals import LiveBytes
from mtrain_language.meshes.pipeline import Stage
from mtrain_language.meshes.stages import divide, keep
from mtrain_language.meshes.tensor_plan import Style


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage besides its parts of weights, moments and the average."""

    activations: int
    """What the backward passes need that are ahead when most are, with what is received."""
    most: int
    """The most at a time."""


def in_flight(*, stage: int, count: int, passes: int) -> int:
    """Return of how many micro batches stage ``stage`` of ``count`` has results at a time."""
    return passes if passes < count else count - stage


def of_stage(part: Stage, batch: BatchShapes, mesh: Mesh, *, unit: Unit, passes: int) -> StageMemory | None:
    """Return the memory of a stage; None: the model cannot be computed so.

    Args:
        part: The stage, see ``stage_of``; of no use afterwards.
        batch: Shapes of a micro batch.
        mesh: The mesh.
        unit: What FSDP gathers at a time.
        passes: Number of micro batches of an update.
    """
    ahead = in_flight(stage=part.number, count=mesh.pipeline, passes=passes)
    rows, length = batch["tokens"][0]
    hidden = (rows, length // mesh.tensor if mesh.sequence else length, part.width)
    try:
        update = _Update(part, batch, hidden, ahead=ahead, passes=passes)
        return StageMemory(update.kept_bytes(), update.most_bytes(unit, shards=mesh.shard))
    except UNCOUNTED:
        return None


def stage_of(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh, *, stage: int) -> Stage:
    """Return the stage of a model without values, with the part that a rank of a tensor group has of its layers."""
    activations.stand_in(model)
    division = divide(model, mesh.pipeline)
    activations.leave_parts(model, plan, mesh)
    keep(model, division, stage=stage)
    model.train()
    part = Stage(model, division, number=stage, precision="fp32", group=None)
    part.watch()
    return part.train()


class _Update:
    """The passes of an update through a stage."""

    def __init__(self, stage: Stage, batch: BatchShapes, hidden: tuple[int, ...], *, ahead: int, passes: int) -> None:
        """Make what passes are given. ``hidden``: the shape of what stages exchange; ``ahead``: the forward passes at the beginning."""
        self._stage = stage
        self._ahead = ahead
        self._count = min(passes, ahead + 1)  # later turns are like the second one
        self._batches = [blank(batch) for _ in range(self._count)]
        dtype = next(stage.parameters()).dtype
        pieces = [torch.empty(hidden, dtype=dtype, device="meta") for _ in range(2 * self._count)]
        self._forward, self._backward = pieces[: self._count], pieces[self._count :]
        ends = (stage.number > 0) + (not stage.is_last)
        self._received = ends * passes * pieces[0].untyped_storage().nbytes()
        # Micro batches as they came, and in one piece for the schedule.
        self._samples = 2 * passes * sum(x.untyped_storage().nbytes() for x in self._batches[0].values())

    def kept_bytes(self) -> int:
        """Return what the backward passes need that are ahead at the beginning, with what is received for all."""
        counter = Counter([*self._model_tensors(), *self._forward])
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda x: x):
            outputs = [self._pass(place) for place in range(self._ahead)]
        del outputs
        return counter.bytes + self._received

    def most_bytes(self, unit: Unit, *, shards: int) -> int:
        """Return the most bytes at a time."""
        live = LiveBytes([*self._model_tensors(), *self._forward, *self._backward, *self._all_samples()])
        schedule = _StageSchedule(live, shards=shards, is_later=False)
        *units, root = schedule.follow(self._stage.units(unit), self._stage)
        live.add(self._received + self._samples)
        with live:
            self._run()
        for each in (root, *units):
            schedule.finish(each)
        return live.most

    def _run(self) -> None:
        """Go through the micro batches, each output and what was sent last as long as torch's schedule has them."""
        flying: deque[Tensor] = deque()
        begun = done = 0
        sent: Tensor | None = None
        for turn in "F" * self._ahead + "BF" * (self._count - self._ahead) + "B" * self._ahead:
            if turn == "F":
                output = self._pass(begun)
                flying.append(output)
                begun += 1
                continue
            flying.popleft().backward(None if self._stage.is_last else self._backward[done])
            sent, self._forward[done].grad = self._forward[done].grad, None
            done += 1
        del sent

    def _pass(self, place: int) -> Tensor:
        given = self._forward[place].requires_grad_()
        output = self._stage(*([given] if self._stage.number else []), **self._batches[place])
        self._stage.results.clear()
        return cast(Tensor, output)

    def _model_tensors(self) -> list[Tensor]:
        model = self._stage.model
        return [*model.parameters(), *model.buffers()]

    def _all_samples(self) -> list[Tensor]:
        return [x for batch in self._batches for x in batch.values()]


class _StageSchedule(Schedule):
    """What FSDP holds of a stage. Gradients stay whole until the end, and weights after a backward pass."""

    @override
    def _before_backward(self, unit: Held, gradient: Tensor) -> None:
        if unit.whole and not unit.is_whole:
            self._gather_backward(unit)

    @override
    def _exchange_unit(self, unit: Held) -> None:
        return

    def finish(self, unit: Held) -> None:
        """Exchange the gradients of a unit."""
        if unit.trained:
            self._reduce(unit)
        else:
            self._reshard(unit)
