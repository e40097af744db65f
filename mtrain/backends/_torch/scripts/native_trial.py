"""Try a script's optimizer on small random arrays: whole, cut into pieces, and with its state saved and restored.

What an optimizer does is decided by these trials and not by a list of names, because scripts bring optimizers of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mtrain.backends._torch.native import Made, NativeRule
from mtrain.backends._torch.scripts.native_copies import ParameterPiece, move_optimizer
from mtrain.backends._torch.state import to_numpy
from mtrain.errors import SpecError

UPDATES = 12
"""Length of a trial. Rules that do something else now and then, such as Lookahead, mostly do it within ten updates."""
SAVED_AFTER = 5
SIDES: Mapping[int, int] = {0: 1, 1: 5000, 2: 72, 3: 18}
"""Longest side of an array of the trial by its number of axes: above the 4096 elements from which some optimizers treat
arrays otherwise."""
SIDE = 9
"""The same for arrays with more axes."""
ALIKE = 2
"""Number of parameters of the trial with the same group and number of axes."""
LAST_BITS = 32
"""Differences that are due to rounding, in units of the type's precision. Fused kernels round the last elements of an array
otherwise, and those of a part are others."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """What a trial has found."""

    problem: str = ""
    """Why parts of arrays cannot be stepped; empty if they can."""
    same_bits: bool = True
    """Whether parts are stepped to the bits of whole arrays."""
    split: frozenset[str] = frozenset()
    """The moments that are split like their parameters; others are numbers that all parts share."""


@dataclass(slots=True)
class _Trial:
    """A copy of the optimizer with small parameters."""

    optimizer: Any
    parameters: Sequence[Tensor]
    rule: NativeRule = field(init=False)

    def __post_init__(self) -> None:
        self.rule = NativeRule(self.optimizer, self.parameters)

    def run(self, gradients: Callable[[int], Sequence[Tensor]], updates: range) -> None:
        """Make updates, each with random numbers of its own."""
        for update in updates:
            for parameter, gradient in zip(self.parameters, gradients(update), strict=True):
                parameter.grad = gradient
            torch.manual_seed(update)
            self.optimizer.step()


class Trials:
    """The trials of one optimizer on this rank; all ranks find the same."""

    def __init__(self, made: Made) -> None:
        """Choose arrays for the trials."""
        self._made = made
        self._choose = _choose(made)
        self._shapes = [_small(made.shapes[id(parameter)]) for parameter in self._choose]

    def try_parts(self) -> TrialVerdict:
        """Find out whether the optimizer steps pieces of flattened arrays to the values of whole arrays."""
        name = type(self._made.optimizer).__name__
        if isinstance(self._made.optimizer, torch.optim.LBFGS):
            return TrialVerdict(f"{name} joins all arrays into one vector")
        with _random_numbers_kept(self._choose):
            try:
                whole = self._copy(self._shapes, [0] * len(self._shapes))
                whole.run(self._gradients, range(UPDATES))
            except Exception as error:
                return TrialVerdict(f"{name} could not be tried: {type(error).__name__}: {error}")
            try:
                pieces = [self._piece(0), self._piece(1)]
                if (verdict := _compare(name, whole, pieces)).problem:
                    return verdict
                pieces.append(self._piece(2))
            except Exception as error:
                return TrialVerdict(f"{name} fails on parts of arrays: {type(error).__name__}: {error}")
            return _compare(name, whole, pieces)

    def try_resume(self) -> str:
        """Return why a job that is resumed would go on otherwise, empty if it would not or if that cannot be tried."""
        shapes, firsts = self._shapes, [0] * len(self._shapes)
        with _random_numbers_kept(self._choose):
            try:
                whole, before, after = (self._copy(shapes, firsts) for _ in range(3))
                whole.run(self._gradients, range(UPDATES))
                before.run(self._gradients, range(SAVED_AFTER))
            except Exception:
                return ""
            names = [str(place) for place in range(len(shapes))]
            saved = {
                f"{moment}/{name}": to_numpy(tensor)
                for moment, tensors in before.rule.moments.items()
                for name, tensor in zip(names, tensors, strict=True)
                if tensor is not None
            }
            with torch.no_grad():
                for own, other in zip(after.parameters, before.parameters, strict=True):
                    own.copy_(other)
            after.rule.expect(names, saved)
            try:
                after.run(self._gradients, range(SAVED_AFTER, UPDATES))
            except Exception as error:
                return f"with a restored state it fails: {type(error).__name__}: {error}"
            if all(torch.equal(a, b) for a, b in zip(whole.parameters, after.parameters, strict=True)):
                return ""
            return "with a restored state it goes on to other weights"

    def _copy(self, shapes: Sequence[tuple[int, ...]], firsts: Sequence[int]) -> _Trial:
        """Return a copy of the optimizer for arrays of ``shapes`` that begin at element ``firsts`` of the whole ones."""
        values = self._draw(seed=1)
        parameters = [
            torch.nn.Parameter(value.reshape(-1)[first : first + prod(shape)].clone().reshape(shape))
            for value, first, shape in zip(values, firsts, shapes, strict=True)
        ]
        pieces = {
            id(parameter): ParameterPiece(own, first)
            for parameter, own, first in zip(self._choose, parameters, firsts, strict=True)
        }
        return _Trial(move_optimizer(self._made, pieces), parameters)

    def _piece(self, number: int) -> _Trial:
        """Return the optimizer of piece 0, 1 or 2 of each flattened array, after all updates; the last one is empty."""
        lengths = [prod(shape) for shape in self._shapes]
        bounds = [(0, length // 3, length, length) for length in lengths]
        firsts, ends = [bound[number] for bound in bounds], [bound[number + 1] for bound in bounds]
        piece = self._copy([(end - first,) for first, end in zip(firsts, ends, strict=True)], firsts)

        def gradients(update: int) -> list[Tensor]:
            whole = self._gradients(update)
            return [x.reshape(-1)[a:b].clone() for x, a, b in zip(whole, firsts, ends, strict=True)]

        piece.run(gradients, range(UPDATES))
        return piece

    def _gradients(self, update: int) -> list[Tensor]:
        return self._draw(seed=2 + update)

    def _draw(self, *, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter)
            for parameter, shape in zip(self._choose, self._shapes, strict=True)
        ]


def _choose(made: Made) -> list[Tensor]:
    """Return some parameters of each group: a few of each number of axes, the longest ones."""
    chosen: list[Tensor] = []
    for group in made.optimizer.param_groups:
        by_axes: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.requires_grad:
                by_axes.setdefault(len(made.shapes[id(parameter)]), []).append(parameter)
        for alike in by_axes.values():
            chosen += sorted(alike, key=lambda parameter: -made.shapes[id(parameter)].numel())[:ALIKE]
    return chosen


def _small(shape: torch.Size) -> tuple[int, ...]:
    return tuple(min(length, SIDES.get(len(shape), SIDE)) for length in shape)


def _compare(name: str, whole: _Trial, pieces: Sequence[_Trial]) -> TrialVerdict:
    """Compare weights and moments of whole arrays with those of their pieces."""
    verdict = TrialVerdict()
    for place, parameter in enumerate(whole.parameters):
        joined = torch.cat([piece.parameters[place].detach() for piece in pieces])
        verdict = _with(verdict, name, parameter.detach(), joined)
    moments = [piece.rule.moments for piece in pieces]
    for moment, tensors in whole.rule.moments.items():
        for place, tensor in enumerate(tensors):
            parts = [found[moment][place] for found in moments if moment in found]
            if tensor is None or verdict.problem:
                continue
            tensors_of_parts = [part for part in parts if part is not None]
            shapes = [tuple(part.shape) for part in tensors_of_parts]
            if (
                tensor.dim() > 0
                and tensor.shape == whole.parameters[place].shape
                and shapes == [tuple(piece.parameters[place].shape) for piece in pieces]
            ):
                verdict = replace(verdict, split=verdict.split | {moment})
                verdict = _with(verdict, name, tensor, torch.cat(tensors_of_parts))
            elif tensor.dim() == 0 and shapes == [()] * len(pieces):
                for part in tensors_of_parts:
                    verdict = _with(verdict, name, tensor, part)
            else:
                entry, shape = moment.partition(".")[2], tuple(whole.parameters[place].shape)
                return TrialVerdict(
                    f"{name} keeps {entry!r} of shape {tuple(tensor.shape)} for a parameter of shape {shape}"
                )
    return verdict


def _with(verdict: TrialVerdict, name: str, whole: Tensor, joined: Tensor) -> TrialVerdict:
    """Return the verdict after values of a whole array were compared with those of its pieces."""
    whole, joined = whole.reshape(-1), joined.reshape(-1)
    if torch.equal(whole, joined) or verdict.problem:
        return verdict
    size = whole.double().abs()
    difference = float(((whole.double() - joined.double()).abs() / size.clamp(min=float(size.mean()))).max())
    rounding = LAST_BITS * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
    if difference <= rounding:
        return replace(verdict, same_bits=False)
    return TrialVerdict(
        f"{name} computes other values on parts of an array than on the whole array, by up to {difference:.1g} of a value"
    )


@contextmanager
def _random_numbers_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the random generators afterwards, from which models that are built later draw."""
    devices = sorted({parameter.device.index for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        yield


def check_resumes(made: Made) -> None:
    """Refuse an optimizer whose state cannot be saved and restored.

    Raises:
        SpecError: a trial has gone on otherwise.
    """
    if problem := Trials(made).try_resume():
        raise SpecError(
            f"session.prepare: a job with {type(made.optimizer).__name__} cannot be resumed exactly: {problem}; keep what changes "
            "while training in `state` or `param_groups` of the optimizer"
        )
