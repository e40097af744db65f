"""What many hosts have in common, and which of them are odd: the values that most share, and the others by name."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from mtrain.spec.hostnames import few

T = TypeVar("T")


def reference(items: Sequence[T], key: Callable[[T], Hashable]) -> T:
    """Return the first of the items whose ``key`` is the most frequent one; of equally frequent keys the first counts."""
    # Differences are told from what most hosts have, so that one odd host is named and not all others.
    counts = Counter(map(key, items))
    return max(items, key=lambda item: counts[key(item)])


def in_words(values: Mapping[str, str]) -> str:
    """Return the values of hosts (label -> value) in one phrase: what most have, then the others with their hosts."""
    labels: dict[str, list[str]] = {}
    for label, value in values.items():
        labels.setdefault(value, []).append(label)
    if len(labels) == 1:
        return next(iter(labels))
    first, *others = sorted(labels.items(), key=lambda item: -len(item[1]))
    phrases = [f"{value} on {few(hosts)}" for value, hosts in others]
    return "; ".join([f"{first[0]} on {len(first[1])} hosts", *phrases])
