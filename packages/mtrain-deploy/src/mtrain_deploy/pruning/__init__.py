"""Pruning: find the channels of a network that depend on one another, remove the least important, write the rest."""

from typing import Literal, TypeAlias

By: TypeAlias = Literal["bn", "l1", "taylor"]
"""What makes a channel important."""
REQUEST, RESULT, WEIGHTS = "prune.json", "result.json", "weights.safetensors"
"""Files by which the command and the rank that prunes speak to each other."""
