"""Elastic jobs: how the shards of each micro batch come to the hosts that are there.

What a job computes depends on its shards alone (``cluster.shards``), not on who computes them. There are two ways to
have fewer hosts compute all of them: more ranks on each host, one per shard, or ranks that compute several shards one
after the other (``cluster.sharing``).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from mtrain.core.interfaces import Host, Recipe
from mtrain.errors import SpecError
from mtrain.spec.model import Spec

RANKS, PASSES = "ranks", "passes"
"""Values of ``cluster.sharing``, besides "auto"."""


def is_elastic(spec: Spec) -> bool:
    """Return whether the job may lose hosts and go on."""
    return spec.cluster.min_nodes is not None


def sharing(spec: Spec, *, on_cpu: bool) -> str:
    """Return how fewer hosts compute all shards; two ranks cannot share a device with NCCL."""
    chosen = spec.cluster.sharing
    return chosen if chosen != "auto" else RANKS if on_cpu else PASSES


def has_rank_per_shard(spec: Spec, *, on_cpu: bool) -> bool:
    """Return whether the job is elastic and fewer hosts have more ranks each, one per shard."""
    return is_elastic(spec) and sharing(spec, on_cpu=on_cpu) == RANKS


def check(spec: Spec, hosts: Sequence[Host]) -> None:
    """Refuse an elastic job that could never run as the spec says.

    Raises:
        SpecError: fewer hosts are named than it needs, or there are fewer shards than hosts.
    """
    fewest, shards = spec.cluster.min_nodes, spec.cluster.shards
    if fewest is not None and fewest > len(hosts):
        raise SpecError(
            f"cluster.min_nodes: {fewest} given for {len(hosts)} hosts; name that many with --ips, or give fewer"
        )
    if is_elastic(spec) and shards is not None and shards < len(hosts):
        raise SpecError(
            f"cluster.shards: {shards} given for {len(hosts)} hosts, so some would compute nothing; give at least "
            f"{len(hosts)}"
        )


def check_passes(recipe: Recipe, *, size: int, model: str, spans_ranks: bool) -> None:
    """Refuse what cannot be computed shard after shard on one rank.

    Raises:
        SpecError: there are other numbers of shards and ranks, and the model or an option needs all shards of a micro
            batch at the same time.
    """
    if recipe.shards in (None, recipe.data_size(size)):
        return
    for reason in needs_all_shards(sync_batchnorm=recipe.sync_batchnorm, model=model, spans_ranks=spans_ranks):
        raise SpecError(
            f"{reason}, and here {size} rank{'s' if size > 1 else ''} would compute {recipe.shards} shards one after "
            "the other; give cluster.sharing=ranks, or as many ranks as shards (cluster.shards)"
        )


def needs_all_shards(*, sync_batchnorm: bool, model: str, spans_ranks: bool) -> list[str]:
    """Return what needs all shards of a micro batch at the same time, each as a key of the spec and its reason."""
    reasons = {
        "train.sync_batchnorm: it normalises over all shards of a micro batch": sync_batchnorm,
        f"model.name: the loss of {model} is divided by a sum over all shards of a micro batch": spans_ranks,
    }
    return [reason for reason, holds in reasons.items() if holds]


def spread(hosts: Sequence[Host], present: Sequence[int], *, shards: int) -> list[Host]:
    """Return the hosts that are present, with one rank per shard.

    Each host keeps its own number of ranks where it can. What is missing goes one by one to the host that is the least
    crowded in proportion to its own number, of equal ones to the first.

    Args:
        hosts: All hosts of the job, with the numbers of ranks that they have when all are there.
        present: Indices of the hosts that are there.
        shards: Ranks of the job.
    """
    counts = _ranks([hosts[node].slots for node in present], shards=shards)
    return [
        host if host.slots == count else replace(host, slots=count)
        for host, count in zip((hosts[node] for node in present), counts, strict=True)
        if count
    ]


def _ranks(own: Sequence[int], *, shards: int) -> list[int]:
    """Return the number of ranks of each host with one rank per shard, see ``spread``; ``own``: with all hosts there."""
    total = sum(own)
    # Before a host may be more crowded than shards / total, all others are filled up to there. So only what rounding leaves,
    # less than one rank for each host, is given one by one.
    counts = [shards * each // total for each in own]
    left = shards - sum(counts)
    heap = [((count + 1) / each, place) for place, (count, each) in enumerate(zip(counts, own, strict=True))]
    heapq.heapify(heap)
    for _ in range(left):
        _, place = heap[0]
        counts[place] += 1
        heapq.heapreplace(heap, ((counts[place] + 1) / own[place], place))
    return counts


def _of_each_number(ranks: Sequence[int]) -> dict[int, int]:
    """Return the ranks of the first host with each number of them, and of the second host, by place; without hosts that have none.

    The second host is there so that a launcher that starts one host only sees that there are several.
    """
    first_with = {number: place for place, number in reversed(list(enumerate(ranks)))}
    return {place: ranks[place] for place in sorted({*first_with.values(), min(1, len(ranks) - 1)}) if ranks[place]}


def _of_equal_hosts(count: int, shards: int) -> dict[int, int]:
    """Return ``_of_each_number`` of so many hosts of which all have the same own number of ranks, in a few steps."""
    each, more = divmod(shards, count)
    places = sorted({0, more, min(1, count - 1)})
    return {place: ranks for place in places if (ranks := each + (place < more))}


def check_every_number(
    hosts: Sequence[Host], *, fewest: int, shards: int, plan: Callable[[Sequence[Host]], object]
) -> None:
    """Refuse, before anything is started, a job whose launcher could not start it on fewer hosts.

    Of each number of hosts it is asked for the first one with each number of ranks, and once for the same numbers.

    Args:
        hosts: All hosts of the job.
        fewest: ``cluster.min_nodes``.
        shards: Ranks of the job.
        plan: Makes the launcher's commands for hosts with numbers of ranks.

    Raises:
        SpecError: the launcher refuses some number of hosts; the message says which.
    """
    # All commands of every number of hosts would be a million for 1,000 hosts. What a launcher refuses are numbers of ranks.
    own, seen = [host.slots for host in hosts], set[tuple[int, ...]]()
    are_alike = len(set(own)) == 1
    for count in range(len(hosts), fewest - 1, -1):
        chosen = _of_equal_hosts(count, shards) if are_alike else _of_each_number(_ranks(own[:count], shards=shards))
        asked = tuple(chosen.values())
        if asked in seen:
            continue
        seen.add(asked)
        try:
            plan([replace(hosts[place], slots=ranks) for place, ranks in chosen.items()])
        except SpecError as error:
            several = [number for number in range(1, 65) if not _uneven(number * shards, fewest, len(hosts))]
            advice = f"; or give cluster.shards={several[0] * shards}" if several else ""
            raise SpecError(
                f"with {count} of {len(hosts)} hosts this elastic job could not go on: {error}{advice}"
            ) from error


def _uneven(shards: int, fewest: int, most: int) -> bool:
    """Return whether some number of hosts does not divide the shards."""
    return any(shards % count for count in range(fewest, most + 1))
