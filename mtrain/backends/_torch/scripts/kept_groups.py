"""Process groups that a script ends itself are released only where that cannot hold up its process for ever.

The module ``DistributedDataParallel`` holds the last reference to its group once ``destroy_process_group`` was called. Torch frees
it with Python's lock held, waits for gloo's thread meanwhile, and that thread needs the lock if it has not yet finished with the last
exchange. On a busy machine a rank then hangs after its last line (docs/found.md, torch 2.13).
"""

import functools
import gc
import sys
from typing import Any

from mtrain_trace.startup import AfterImport

MODULE = "torch.distributed.distributed_c10d"


def keep_groups() -> None:
    """Keep the process groups that the code of this process will end, without importing torch now."""
    if MODULE in sys.modules:
        _wrap(sys.modules[MODULE])
        return
    failure = "mtrain: process groups of this script are released by torch, which may wait for ever"
    sys.meta_path.insert(0, AfterImport({MODULE: _wrap}, failure))


def _wrap(module: Any) -> None:
    """Have ``destroy_process_group`` keep the groups, and ``init_process_group`` release those kept before."""
    kept: list[Any] = []
    ended = 0  # groups of all ranks
    destroy, init = module.destroy_process_group, module.init_process_group

    def destroy_process_group(group: Any = None) -> None:
        nonlocal ended
        ended += group in (None, module.group.WORLD)
        kept.append(module.group.WORLD if group is None else group)
        destroy(group)

    def init_process_group(*arguments: Any, **options: Any) -> None:
        # By now gloo's thread has finished with it. Its port becomes free. Models in cycles of references go before.
        if kept:
            gc.collect()
            kept.clear()
        # Torch counts from 0 again, so that the addresses of the former group stand in the store under the names of the new one.
        # Another rank may still keep that group: its port answers, and closes the connection as soon as the group is released.
        if ended:
            from mtrain.backends._torch import internals

            internals.count_groups_from(module, ended)
        init(*arguments, **options)

    for original, wrapper in ((destroy, destroy_process_group), (init, init_process_group)):
        name = original.__name__
        functools.update_wrapper(wrapper, original)
        for holder in (module, sys.modules.get("torch.distributed")):
            if getattr(holder, name, None) is original:  # else it is somebody else's, and stays
                setattr(holder, name, wrapper)
