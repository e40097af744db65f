"""Profiles of what a rank computes, by ``paddle.profiler``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle import profiler


@contextmanager
def record(file: Path, *, on_gpu: bool) -> Iterator[None]:
    """See ``Capabilities.profile``."""
    targets = [profiler.ProfilerTarget.CPU, *([profiler.ProfilerTarget.GPU] if on_gpu else [])]
    recording: Any = profiler.Profiler(
        targets=targets, on_trace_ready=lambda done: done.export(str(file), format="json")
    )
    with recording:
        yield
