"""Let DeepSpeed train in float64, which mtrain's comparisons between backends need.

DeepSpeed 0.19.8 has no setting for a type wider than float32, so the methods that choose types are replaced here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as ModulePatch


@contextmanager
def engines_in_float64() -> Iterator[None]:
    """Make DeepSpeed engines that keep weights, gradients and messages of a float64 model in float64, while inside."""
    _let_float64_be_reduced()
    master = ZeROOptimizer._configure_master_weights
    init, wrapper = DeepSpeedEngine.__init__, DeepSpeedEngine._do_optimizer_sanity_check
    set_dtype = ModulePatch._set_dtype

    def float64_messages(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        engine._config.communication_data_type = torch.float64

    def no_wrapper_in_stage_0(engine: Any, basic_optimizer: Any) -> Any:
        # In stage 0 DeepSpeed treats every type but float32 and float16 as bfloat16. Its wrapper for that type would
        # overwrite the model's weights with its own copies.
        return wrapper(engine, basic_optimizer) if engine.zero_optimization() else None

    def master_weights(zero: Any, **kwargs: Any) -> torch.dtype:
        master(zero, **kwargs)
        return torch.float64

    def accepted_dtype(patch: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        # Stage 3 refuses float64 on processors that have float16, and ignores the type on others. The type applies to
        # modules that are built later; a model that is split after it was built keeps its own.
        set_dtype(patch, ds_config, torch.float32 if dtype == torch.float64 else dtype)

    replacements = {
        "get_data_types": lambda engine: (torch.float64, torch.float64),
        "communication_data_type": property(lambda engine: torch.float64),
        "__init__": float64_messages,
        "_do_optimizer_sanity_check": no_wrapper_in_stage_0,
    }
    originals = {name: vars(DeepSpeedEngine)[name] for name in replacements}
    for name, value in replacements.items():
        setattr(DeepSpeedEngine, name, value)
    ZeROOptimizer._configure_master_weights = master_weights
    ModulePatch._set_dtype = accepted_dtype
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = master
        ModulePatch._set_dtype = set_dtype
        for name, value in originals.items():
            setattr(DeepSpeedEngine, name, value)


def _let_float64_be_reduced() -> None:
    """Add float64 to the types that the device supports: stage 0 sums gradients of supported types only.

    DeepSpeed asks for them long after the engine was made, so this change stays in place.
    """
    accelerator: Any = get_accelerator()
    supported_dtypes = type(accelerator).supported_dtypes
    accelerator.supported_dtypes = lambda: [*supported_dtypes(accelerator), torch.float64]
