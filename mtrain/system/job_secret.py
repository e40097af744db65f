"""A word that only the ranks of one job know, so that they can tell each other from strangers on the same network."""

import secrets

from mtrain.spec.sources import CLUSTER_SECRET as CLUSTER_VARIABLE
from mtrain.spec.sources import JOB_SECRET as VARIABLE

__all__ = ["CLUSTER_VARIABLE", "VARIABLE", "drawn"]


def drawn() -> dict[str, str]:
    """A new one, as the variable that the ranks of one job are given."""
    return {VARIABLE: secrets.token_hex(32)}
