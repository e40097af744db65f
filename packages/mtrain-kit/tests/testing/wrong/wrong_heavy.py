"""A plugin that imports its framework on top."""

import torch  # noqa: F401

from mtrain.backends.ddp import DDP


class Heavy(DDP):
    """Like ddp, but heavy."""
