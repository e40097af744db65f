"""The most bytes that a rank holds at a time while it computes a micro batch, counted on a language model without values.

The model computes forward and backward. Its tensors count as long as something refers to them: inner results, gradients of
them, and whole gradients of weights. What FSDP2 holds besides is added where it holds it, as torch 2.13 does over gloo:

* A unit is gathered into one piece of memory, for which gloo needs a second one meanwhile, and copied from there into its
  weights. The piece stays until the next unit is copied; backward, the piece of the next unit is filled before this one is
  computed.
* Gradients of a unit are copied into one piece, added up by gloo in a second one, and leave this rank its part. The first piece
  stays until the next unit's gradients are copied.
* Before the last micro batch of an update, whole gradients stay where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from mtrain.backends._fsdp.internals import leaves
from mtrain_language.meshes.activations import UNCOUNTED, BatchShapes, blank
from mtrain_language.meshes.internals import LiveBytes


def most_bytes(
    model: nn.Module, batch: BatchShapes, units: Mapping[str, nn.Module], *, shards: int, passes: int
) -> int | None:
    """Return the most bytes besides weights' parts, moments and average; None: the model cannot be computed so.

    Args:
        model: A model that ``activations.kept_bytes`` has prepared. It is of no use afterwards.
        batch: Shapes of a micro batch.
        units: See ``units.units``.
        shards: Number of ranks over which weights are split.
        passes: Number of micro batches of an update.
    """
    live = LiveBytes([*model.parameters(), *model.buffers()])
    schedule = Schedule(live, shards=shards, is_later=passes > 1)
    schedule.follow([*units.values()], model)
    try:
        with live:
            model(blank(batch))["total"].backward()
    except UNCOUNTED:
        return None
    return live.most


@dataclass(eq=False, slots=True)
class Held:
    """What FSDP holds of a unit."""

    weights: Sequence[nn.Parameter]
    is_root: bool
    whole: int = 0
    """Bytes of its whole weights."""
    trained: int = 0
    """Bytes of its whole gradients."""
    missing: int = 0
    """Number of weights whose gradients are not there yet."""
    is_whole: bool = False


@dataclass
class Schedule:
    """What FSDP holds, as the passes go on."""

    live: LiveBytes
    shards: int
    is_later: bool
    """Whether whole gradients of earlier micro batches are there."""
    _order: list[Held] = field(default_factory=list)
    """Units in the order in which their forward passes ended."""
    _piece: int = 0
    """Bytes of the piece into which a unit was gathered in the forward pass."""
    _ahead: list[Held] = field(default_factory=list)
    """The units whose pieces were filled ahead."""
    _reduced: int = 0
    """Bytes of the piece whose gradients were added up last."""

    def follow(self, units: Sequence[nn.Module], model: nn.Module) -> list[Held]:
        """Watch the units of a model, and that of the whole model; return them in this order."""
        taken: set[int] = set()
        found = []
        for module in [*units, model]:
            own = [x for x in module.parameters() if id(x) not in taken]
            taken |= {id(x) for x in own}
            found.append(self._follow(module, own, is_root=module is model))
        return found

    def _follow(self, module: nn.Module, own: Sequence[nn.Parameter], *, is_root: bool) -> Held:
        trained = [x for x in own if x.requires_grad]
        unit = Held(own, is_root, whole=_bytes(own), trained=_bytes(trained), missing=len(trained))
        if self.is_later:
            self.live.add(unit.trained)
        module.register_forward_pre_hook(lambda *_: self._enter(unit), prepend=True)
        module.register_forward_hook(lambda module, inputs, output: self._leave(unit, output))
        for weight in trained:
            weight.register_post_accumulate_grad_hook(lambda _: self._exchange_unit(unit))
        return unit

    def _enter(self, unit: Held) -> None:
        if unit.whole and not unit.is_whole:
            self._gather(unit, forward=True)

    def _gather(self, unit: Held, *, forward: bool) -> None:
        """Fill a piece, unless that was done ahead, and copy from it. In the forward pass, the piece stays until the next one's copy."""
        size = unit.whole if self.shards > 1 else 0
        if unit in self._ahead:
            self._ahead.remove(unit)
        else:
            self._fill(size)
        if forward:
            self._drop_piece()
            self._piece = size
        self.live.add(unit.whole)
        if not forward:
            self.live.add(-size)
        unit.is_whole = True

    def _fill(self, size: int) -> None:
        self.live.add(2 * size)
        self.live.add(-size)  # what gloo needed

    def _drop_piece(self) -> None:
        self.live.add(-self._piece)
        self._piece = 0

    def _leave(self, unit: Held, output: object) -> None:
        self._reshard(unit)
        if unit.is_root:
            self._drop_piece()
        if unit not in self._order:
            self._order.append(unit)
        for tensor in leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    def _reshard(self, unit: Held) -> None:
        if unit.is_whole:
            self.live.add(-unit.whole)
        unit.is_whole = False

    def _before_backward(self, unit: Held, gradient: Tensor) -> None:
        if unit.is_whole or not unit.whole or (unit.trained and not unit.missing):
            return
        for other in self._order:
            if not other.trained and not other.is_root:
                self._reshard(other)
        self._gather_backward(unit)

    def _gather_backward(self, unit: Held) -> None:
        """Gather a unit, and fill the piece of the one whose forward pass ended before."""
        self._gather(unit, forward=False)
        earlier = [other for other in self._order[: self._order.index(unit)] if other.whole]
        if earlier and self.shards > 1 and not earlier[-1].is_whole and earlier[-1] not in self._ahead:
            self._ahead.append(earlier[-1])
            # FSDP2 prefetches one unit backward, in the order in which forward passes ended.
            self._fill(earlier[-1].whole)

    def _exchange_unit(self, unit: Held) -> None:
        """Exchange a unit's gradients once all are there."""
        unit.missing -= 1
        if unit.missing:
            return
        self._reduce(unit)

    def _reduce(self, unit: Held) -> None:
        self._reshard(unit)
        self.live.add(-self._reduced)
        self.live.add(unit.trained)  # the piece with copies of all gradients
        self._reduced = unit.trained
        for weight in unit.weights:
            # Gradients leave as parts; what is whole would be counted twice.
            weight.grad = None
        if self.is_later:
            self.live.add(-unit.trained)
        part = unit.trained // self.shards
        self.live.add(part)
        if self.shards > 1:
            self.live.add(unit.trained)  # in which gloo adds up
            self.live.add(-unit.trained)


def _bytes(weights: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in weights)
