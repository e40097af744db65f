"""A model plugin of the tests: ``hf``, whose ranks append to ``sent-RANK.txt`` what they have sent before each update.

The variable ``COUNTED_PASSES`` is the number of micro batches of an update.
"""

import os
from pathlib import Path
from typing import Any

from mtrain.core.overriding import override
from mtrain.core.ranks.traffic import sent_bytes
from mtrain_language.model import HuggingFaceModel

PASSES = int(os.environ["COUNTED_PASSES"])


class Counted(HuggingFaceModel):
    """Model ``hf``, with the kernel's count of bytes sent over TCP."""

    @override
    def build(self, task: Any, collective: Any) -> Any:
        module = super().build(task, collective)
        module.register_forward_pre_hook(_Count(collective.rank))
        return module


class _Count:
    def __init__(self, rank: int) -> None:
        self._passes = 0
        self._file = Path(f"sent-{rank}.txt").absolute()

    def __call__(self, module: Any, inputs: Any) -> None:
        """Note the bytes before the first forward pass of an update."""
        if not module.training:
            return
        if self._passes % PASSES == 0:
            with self._file.open("a") as file:
                file.write(f"{sent_bytes()}\n")
        self._passes += 1
