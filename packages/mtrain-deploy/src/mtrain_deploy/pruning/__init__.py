"""Pruning: find the channels of a network that depend on one another, remove the least important, write the rest."""

from typing import Literal, TypeAlias

By: TypeAlias = Literal["bn", "l1", "taylor"]
"""What makes a channel important."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of a group that the sensitivity table masks, one after the other, unless others are asked for."""
SAMPLES = 32
"""Number of samples of the evaluation split that it scores unless another number is asked for."""
REQUEST, RESULT, WEIGHTS = "prune.json", "result.json", "weights.safetensors"
"""Files by which the command and the rank that prunes speak to each other."""
