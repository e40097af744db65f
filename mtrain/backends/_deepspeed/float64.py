"""Float64 for proofs of equality: DeepSpeed knows no type wider than float32, and has no setting for one."""

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
    """DeepSpeed engines made inside keep weights, gradients and messages of a float64 model in float64."""
    _let_float64_be_reduced()
    master = ZeROOptimizer._configure_master_weights
    init, wrapper = DeepSpeedEngine.__init__, DeepSpeedEngine._do_optimizer_sanity_check
    set_dtype = ModulePatch._set_dtype

    def float64_messages(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        engine._config.communication_data_type = torch.float64

    def no_wrapper_in_stage_0(engine: Any, basic_optimizer: Any) -> Any:
        # It would take float64 for bfloat16, and write weights of its own over those of the model.
        return wrapper(engine, basic_optimizer) if engine.zero_optimization() else None

    def master_weights(zero: Any, **kwargs: Any) -> torch.dtype:
        master(zero, **kwargs)
        return torch.float64

    def known_type(patch: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        # Stage 3 refuses float64 on processors that have float16, and ignores the type on others. It is that of modules built
        # later; those that are cut here keep their own.
        set_dtype(patch, ds_config, torch.float32 if dtype == torch.float64 else dtype)

    replaced = {
        "get_data_types": lambda engine: (torch.float64, torch.float64),
        "communication_data_type": property(lambda engine: torch.float64),
        "__init__": float64_messages,
        "_do_optimizer_sanity_check": no_wrapper_in_stage_0,
    }
    kept = {name: vars(DeepSpeedEngine)[name] for name in replaced}
    for name, value in replaced.items():
        setattr(DeepSpeedEngine, name, value)
    ZeROOptimizer._configure_master_weights = master_weights
    ModulePatch._set_dtype = known_type
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = master
        ModulePatch._set_dtype = set_dtype
        for name, value in kept.items():
            setattr(DeepSpeedEngine, name, value)


def _let_float64_be_reduced() -> None:
    """Stage 0 sums gradients of the types only that the device is said to have, long after the engine was made."""
    accelerator: Any = get_accelerator()
    known = type(accelerator).supported_dtypes
    accelerator.supported_dtypes = lambda: [*known(accelerator), torch.float64]
