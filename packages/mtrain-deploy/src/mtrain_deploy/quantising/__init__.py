"""``mtrain quantise``: an exported model whose layers compute with 8-bit integers."""

from typing import Literal, TypeAlias

Method: TypeAlias = Literal["minmax", "percentile"]
"""How a range follows from values: the extremes, or without the largest 0.001 %."""
