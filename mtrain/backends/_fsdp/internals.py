"""Everything that this backend uses of torch and transformers without a promise of theirs: private names."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, debug
from torch.utils._pytree import tree_leaves

from mtrain.backends._torch.internals import torch_version
from mtrain.core.ranks.arithmetic import wrong_result
from mtrain.errors import LaunchError

TESTED = ("2.8.0", "2.9.1", "2.10.0", "2.13.0")
"""Versions of torch with which these internals were tested; see docs/versions.md."""


def shard(unit: nn.Module, mesh: DeviceMesh) -> FSDPModule:
    """Split the weights of a unit over the ranks of a mesh, in place; every rank must call."""
    module: FSDPModule = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    if _averages_by_sums(mesh):
        module.set_force_sum_reduction_for_comms(True)
    group: Any = module._get_fsdp_state()._fsdp_param_group
    if torch_version() < (2, 10) and group is not None:
        # Up to torch 2.9, FSDP copies parts that it has padded once more in the first forward pass. An optimizer that has
        # them already would update memory that nobody reads.
        group._reset_sharded_params = True
    return module


def check_averages(mesh: DeviceMesh) -> None:
    """Refuse a torch whose ranks do not get the mean of their gradients from FSDP's exchange; every rank must call.

    Raises:
        LaunchError: What a rank gets is not its part of the mean.
    """
    group = mesh.get_group(mesh.ndim - 1)
    size, by_sums = mesh.size(mesh.ndim - 1), _averages_by_sums(mesh)
    given = torch.zeros(size, 2, device=mesh.device_type)
    if group.rank() == 0:
        given += size
    op = dist.ReduceOp.SUM if by_sums else dist.ReduceOp.AVG
    part = given.new_empty(2)
    _scatter(part, given.view(-1), op=op, group=group)
    right = size if by_sums else 1
    if not part.eq(right).all():
        raise LaunchError(wrong_result("fsdp", "mean of gradients, each rank's part of it,", part.tolist(), right))


_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has renamed the function, and warns of the former name."""


def check_same_memory(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuse a torch whose FSDP has other memory for a part of a weight than it had when it split the model.

    Raises:
        LaunchError: The two tensors of a name lie apart.
    """
    apart = [name for name, (former, now) in pairs.items() if now.numel() and former.data_ptr() != now.data_ptr()]
    if apart:
        raise LaunchError(
            f"backend fsdp: torch {torch.__version__} has moved this rank's part of {apart[0]} ({len(apart)} in all) after the model was "
            "split, and would not train it; use another version (docs/versions.md), or another backend"
        )


def _averages_by_sums(mesh: DeviceMesh) -> bool:
    """Return whether FSDP must divide gradients itself, since the mean of torch's collective is wrong."""
    # Up to torch 2.8, gloo's reduce_scatter_tensor returns the sum for ReduceOp.AVG: every gradient would be too large by the
    # number of ranks, without an error.
    return mesh.device_type == "cpu" and torch_version() < (2, 9)


def forget_meshes() -> None:
    """Drop the last references to the process group."""
    # torch caches how it computed with a mesh, with no public way to clear that. FSDP's hooks and their model refer to
    # each other. A group that is still referenced keeps its threads, which can abort the process when it ends.
    # torch has a function for the cache from 2.11 on.
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()
    gc.collect()


def unsplit_kinds(model: nn.Module) -> set[str]:
    """Return the names of the classes that a model of transformers, or one in it, wants to stay in one piece."""
    return {kind for part in model.modules() for kind in getattr(part, "_no_split_modules", None) or ()}


def leaves(value: object) -> list[Any]:
    """Return what a nested structure of containers holds."""
    return tree_leaves(value)
