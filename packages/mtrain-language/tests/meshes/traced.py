"""A model plugin of the tests: ``hf``, whose ranks write what their third update allocates into ``allocated-RANK.json``.

The variable ``TRACED_PASSES`` is the number of micro batches of an update.
"""

import os
from pathlib import Path
from typing import Any

import torch

from mtrain.core.overriding import override
from mtrain_language.model import HuggingFaceModel

PASSES = int(os.environ.get("TRACED_PASSES", "1"))


class Traced(HuggingFaceModel):
    """Model ``hf``, observed by torch's profiler from one forward pass to the next."""

    @override
    def build(self, task: Any, collective: Any) -> Any:
        module = super().build(task, collective)
        module.register_forward_pre_hook(_Watch(collective.rank))
        return module


class _Watch:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._passes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __call__(self, module: Any, inputs: Any) -> None:
        """Begin before the first forward pass of the third update, and write before that of the fourth."""
        if not module.training:
            return
        self._passes += 1
        if self._passes == 2 * PASSES + 1:
            self._profile.start()
        elif self._passes == 3 * PASSES + 1:
            self._profile.stop()
            self._profile.export_chrome_trace(str(Path(f"allocated-{self._rank}.json").absolute()))
