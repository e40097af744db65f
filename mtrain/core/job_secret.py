"""A word that only the ranks of one job know, so that they can tell each other from strangers on the same network."""

import secrets

VARIABLE = "MTRAIN_JOB_SECRET"
"""Where ranks are told it. It is in no plan, no file and no log: the starter draws it when it starts a job."""
CLUSTER_VARIABLE = "MTRAIN_CLUSTER_SECRET"
"""Where a person says what hosts that are started by hand know of each other. Ranks are not told it."""


def drawn() -> dict[str, str]:
    """A new one, as the variable that the ranks of one job are given."""
    return {VARIABLE: secrets.token_hex(32)}
