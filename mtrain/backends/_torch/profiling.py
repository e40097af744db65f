"""Profiles of what a rank computes, by ``torch.profiler``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@contextmanager
def record(file: Path, *, on_gpu: bool) -> Iterator[None]:
    """See ``Capabilities.profile``."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recording:
        yield
    recording.export_chrome_trace(str(file))
