"""A secret that only the ranks of one job know, by which they recognise each other on a network with other programs."""

import secrets

from mtrain.spec.reserved import CLUSTER_SECRET as CLUSTER_VARIABLE
from mtrain.spec.reserved import JOB_SECRET as VARIABLE

__all__ = ["CLUSTER_VARIABLE", "VARIABLE", "draw_secret"]


def draw_secret() -> dict[str, str]:
    """Draw a new secret, and return it as the environment variable for the ranks of one job."""
    return {VARIABLE: secrets.token_hex(32)}
