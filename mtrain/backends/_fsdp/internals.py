"""Everything that this backend uses of torch and transformers without a promise of theirs: private names."""

import gc
from typing import Any

from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_leaves

TESTED = ("2.13.0",)
"""Versions of torch with which these internals were tested."""


def forget_meshes() -> None:
    """Drop the last references to the process group."""
    # torch caches how it computed with a mesh, with no public way to clear that. FSDP's hooks and their model refer to
    # each other. A group that is still referenced keeps its threads, which can abort the process when it ends.
    _clear_sharding_prop_cache()
    gc.collect()


def unsplit_kinds(model: nn.Module) -> set[str]:
    """Return the names of the classes that a model of transformers, or one in it, wants to stay in one piece."""
    return {kind for part in model.modules() for kind in getattr(part, "_no_split_modules", None) or ()}


def leaves(value: object) -> list[Any]:
    """Return what a nested structure of containers holds."""
    return tree_leaves(value)
