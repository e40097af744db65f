"""Test-time augmentation: a model's output for varied copies of each sample, joined. Needs no framework."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtrain.core.interfaces import Array, HostBatch, Variation


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmented:
    """How a micro batch is varied, and how the outputs for its variations become one."""

    varied: Callable[[HostBatch], Sequence[tuple[HostBatch, Variation]]]
    """See ``TaskKind.varied``."""
    joined: Callable[[Sequence[tuple[Mapping[str, Array], Variation]]], Mapping[str, Array]]
    """See ``Model.joined``."""
