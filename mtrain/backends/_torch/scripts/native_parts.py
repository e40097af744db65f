"""A script's own optimizer on the parts of arrays that a rank holds, where its rule is elementwise."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain.backends._torch.native import Made, NativeRule
from mtrain.backends._torch.scripts.native_copies import ParameterPiece, move_optimizer
from mtrain.backends._torch.scripts.native_trial import Trials, TrialVerdict, check_resumes
from mtrain.backends._torch.sharded.shards import Part, first_element
from mtrain.core.interfaces import Array
from mtrain.core.overriding import override
from mtrain.errors import SpecError

log = logging.getLogger(__name__)


class PartsNativeRule(NativeRule):
    """Applies an optimizer of torch to parts of parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[Tensor], *, split: frozenset[str]) -> None:
        """Apply ``optimizer`` to ``parts``; ``split``: the moments that are split as they are."""
        super().__init__(optimizer, parts)
        self._split = split

    @override
    def _entry(self, moment: str, array: Array, place: int) -> tuple[str, Any] | None:
        entry = super()._entry(moment, array, place)
        if entry is None or moment not in self._split:
            return entry
        # Room for this rank's part, which is copied into it afterwards.
        return entry[0], torch.zeros_like(self._parameters[place], dtype=entry[1].dtype, requires_grad=False)


def rule_for_parts(
    made: Made, names: Sequence[str], parts: Mapping[str, Part], held: Sequence[Tensor], *, rank: int
) -> PartsNativeRule:
    """Return the rule that applies a script's optimizer to this rank's parts; all ranks decide alike.

    Args:
        made: The optimizer, made for the whole model.
        names: Names of the trained parameters.
        parts: Where the parts of each parameter lie.
        held: This rank's parts in the order of ``names``, in the shapes in which their gradients are.
        rank: Number of this rank.

    Raises:
        SpecError: its rule needs whole arrays.
    """
    verdict = decide(made)
    if not verdict.same_bits and rank == 0:
        log.warning(
            "session.prepare: %s rounds the last elements of an array otherwise, so the last bits differ from a backend that keeps "
            "arrays whole; without fused=True they are equal",
            type(made.optimizer).__name__,
        )
    pieces = {
        id(made.parameters[name]): ParameterPiece(tensor, first_element(parts[name], rank))
        for name, tensor in zip(names, held, strict=True)
    }
    rule = PartsNativeRule(move_optimizer(made, pieces), held, split=verdict.split)
    made.forget()
    return rule


def decide(made: Made) -> TrialVerdict:
    """Return what a trial has found of an optimizer that steps parts of arrays.

    Raises:
        SpecError: it needs whole arrays; the message says why.
    """
    verdict = Trials(made).try_parts()
    if verdict.problem:
        raise SpecError(
            f"session.prepare: this backend splits arrays over the ranks, but {verdict.problem}; use backend solo, ddp, horovod or "
            "deepspeed with stage 0, or a rule such as mtrain.AdamW(learning_rate=1e-3)"
        )
    check_resumes(made)
    return verdict
