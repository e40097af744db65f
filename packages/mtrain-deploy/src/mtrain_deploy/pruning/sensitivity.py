"""The sensitivity table: how much score is lost where channels of one group alone are masked."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.core.interfaces import Array
from mtrain_deploy.pruning import SHARES
from mtrain_deploy.pruning.measuring import Bench, TrainedNetwork
from mtrain_deploy.pruning.network import ChannelGroup, Prunable, least_important, mask

_PAUSE_S = 2.0
"""Least time between two reports of progress, but for the last one."""


@dataclass(frozen=True, kw_only=True)
class Masked:
    """The network whose groups are masked one after the other."""

    network: Prunable
    whole: TrainedNetwork
    """It has other weights afterwards."""
    weights: Mapping[str, Array]
    scores: Mapping[int, float]
    """Importance of each set."""


def rows(
    bench: Bench,
    masked: Masked,
    *,
    samples: int,
    shares: Sequence[float] = SHARES,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for each group: its name, its number of sets, and the loss of score for each share.

    Each loss is one evaluation of ``samples`` samples of the evaluation split, which are read once and spread over it.

    Args:
        bench: evaluates.
        masked: what is masked.
        samples: number of samples; all of a smaller split.
        shares: shares of a group that are masked.
        tell: takes a sentence about the progress.
    """
    subset = bench.subset(samples)

    def score(removed: list[int]) -> float:
        bench.fill(masked.whole, mask(masked.network, masked.weights, removed))
        return bench.metrics(masked.whole, subset)[0]["score"]

    before = score([])
    table = []
    for group in _telling(masked.network.groups, tell):
        losses: dict[int, float] = {}
        row = []
        for share in shares:
            removed = least_important(group, masked.scores, round(share * len(group.sets)))
            # Small groups have the same sets for several shares.
            if len(removed) not in losses:
                losses[len(removed)] = before - score(removed)
            row.append(losses[len(removed)])
        counts = {"channels": len(group.sets), "samples": len(subset.indices)}
        table.append({"group": group.name, **counts, "shares": list(shares), "losses": row})
    return table


def _telling(groups: list[ChannelGroup], tell: Callable[[str], None]) -> Iterator[ChannelGroup]:
    """Yield the groups, and tell between them how many are done and how long the others will take."""
    began = told = time.monotonic()
    for i, group in enumerate(groups, start=1):
        yield group
        now = time.monotonic()
        if now - told >= _PAUSE_S or i == len(groups):
            told = now
            left_s = (now - began) / i * (len(groups) - i)
            tell(f"sensitivity: {i} of {len(groups)} groups, {left_s:.0f} s left")
