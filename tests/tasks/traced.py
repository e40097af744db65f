"""A model plugin of the tests: ``hf``, whose rank 0 writes what its third update allocates into ``allocated.json``."""

from pathlib import Path
from typing import Any

import torch

from mtrain.core.overriding import override
from mtrain.tasks.language.model import HuggingFaceModel

BEGIN, END = 3, 4


class Traced(HuggingFaceModel):
    """Model ``hf``, observed by torch's profiler from one forward pass to the next."""

    @override
    def build(self, task: Any, collective: Any) -> Any:
        module = super().build(task, collective)
        if collective.rank == 0:
            module.register_forward_pre_hook(_Watch())
        return module


class _Watch:
    def __init__(self) -> None:
        self._passes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __call__(self, module: Any, inputs: Any) -> None:
        """Begin before the third forward pass in training, and write before the fourth."""
        if not module.training:
            return
        self._passes += 1
        if self._passes == BEGIN:
            self._profile.start()
        elif self._passes == END:
            self._profile.stop()
            self._profile.export_chrome_trace(str(Path("allocated.json").absolute()))
