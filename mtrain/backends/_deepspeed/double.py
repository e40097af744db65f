"""Float64 for proofs of equality: DeepSpeed knows no type wider than float32, and has no setting for one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine


@contextmanager
def engines_in_float64() -> Iterator[None]:
    """DeepSpeed engines made inside keep weights, gradients and messages of a float64 model in float64."""
    types, master = DeepSpeedEngine.get_data_types, ZeROOptimizer._configure_master_weights
    message = DeepSpeedEngine.communication_data_type
    init = DeepSpeedEngine.__init__

    def float64_messages(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        engine._config.communication_data_type = torch.float64

    def master_weights(zero: Any, **kwargs: Any) -> torch.dtype:
        master(zero, **kwargs)
        return torch.float64

    replaced = {
        "get_data_types": lambda engine: (torch.float64, torch.float64),
        "communication_data_type": property(lambda engine: torch.float64),
        "__init__": float64_messages,
    }
    for name, value in replaced.items():
        setattr(DeepSpeedEngine, name, value)
    ZeROOptimizer._configure_master_weights = master_weights
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = master
        for name, value in {"get_data_types": types, "communication_data_type": message, "__init__": init}.items():
            setattr(DeepSpeedEngine, name, value)
