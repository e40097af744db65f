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

from mtrain.backends._fsdp.activations import BatchShapes, blank
from mtrain.backends._fsdp.internals import LiveBytes, leaves


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
    schedule = _Schedule(live, shards=shards, is_later=passes > 1)
    taken: set[int] = set()
    for module in [*units.values(), model]:
        own = [x for x in module.parameters() if id(x) not in taken]
        taken |= {id(x) for x in own}
        schedule.follow(module, own, is_root=module is model)
    try:
        with live:
            model(blank(batch))["total"].backward()
    except (RuntimeError, NotImplementedError, ValueError):  # see kept_bytes
        return None
    return live.most


@dataclass(eq=False, slots=True)
class _Unit:
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
class _Schedule:
    """What FSDP holds, as the passes go on."""

    live: LiveBytes
    shards: int
    is_later: bool
    """Whether whole gradients of earlier micro batches are there."""
    _order: list[_Unit] = field(default_factory=list)
    """Units in the order in which their forward passes ended."""
    _piece: int = 0
    """Bytes of the piece into which a unit was gathered."""
    _ahead: _Unit | None = None
    """The unit whose piece was filled ahead."""
    _reduced: int = 0
    """Bytes of the piece whose gradients were added up last."""

    def follow(self, module: nn.Module, own: Sequence[nn.Parameter], *, is_root: bool) -> None:
        """Watch a unit, whose weights are ``own``."""
        trained = [x for x in own if x.requires_grad]
        unit = _Unit(own, is_root, whole=_bytes(own), trained=_bytes(trained), missing=len(trained))
        if self.is_later:
            self.live.add(unit.trained)
        module.register_forward_pre_hook(lambda *_: self._enter(unit), prepend=True)
        module.register_forward_hook(lambda module, inputs, output: self._leave(unit, output))
        for weight in trained:
            weight.register_post_accumulate_grad_hook(lambda _: self._graded(unit))

    def _enter(self, unit: _Unit) -> None:
        if unit.whole and not unit.is_whole:
            self._gather(unit)

    def _gather(self, unit: _Unit) -> None:
        """Fill a piece, unless that was done ahead, and copy from it; the former piece is freed in between."""
        size = unit.whole if self.shards > 1 else 0
        if self._ahead is not unit:
            self._fill(size)
            former, self._piece = self._piece, size
            self.live.add(-former)
        self._ahead = None
        self.live.add(unit.whole)
        unit.is_whole = True

    def _fill(self, size: int) -> None:
        self.live.add(2 * size)
        self.live.add(-size)  # what gloo needed

    def _drop_piece(self) -> None:
        self.live.add(-self._piece)
        self._piece = 0

    def _leave(self, unit: _Unit, output: object) -> None:
        self._reshard(unit)
        if unit.is_root:
            self._drop_piece()
        self._order.append(unit)
        for tensor in leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    def _reshard(self, unit: _Unit) -> None:
        if unit.is_whole:
            self.live.add(-unit.whole)
        unit.is_whole = False

    def _before_backward(self, unit: _Unit, gradient: Tensor) -> None:
        if unit.is_whole or not unit.whole or (unit.trained and not unit.missing):
            return
        for other in self._order:
            if not other.trained and not other.is_root:
                self._reshard(other)
        self._gather(unit)
        self._drop_piece()
        place = self._order.index(unit)
        earlier = [other for other in self._order[:place] if other.whole]
        if earlier and self.shards > 1:
            self._ahead = earlier[-1]
            self._piece = self._ahead.whole
            self._fill(self._piece)

    def _graded(self, unit: _Unit) -> None:
        """Exchange a unit's gradients once all are there."""
        unit.missing -= 1
        if unit.missing:
            return
        self._reshard(unit)
        self.live.add(-self._reduced)
        self.live.add(unit.trained)  # the piece with copies of all gradients
        self._reduced = unit.trained
        for weight in unit.weights:
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
