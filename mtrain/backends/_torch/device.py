"""The device of one rank."""

import ctypes
import resource
import sys
from typing import Literal

import torch

from mtrain.core.errors import LaunchError

DeviceName = Literal["auto", "cpu", "cuda"]


def choose(name: DeviceName, *, local_rank: int, tf32: bool, keep: bool) -> torch.device:
    """This rank's device, made the current one; ``auto`` is CUDA where there is any. ``keep``: see ``keep_memory``.

    Raises:
        LaunchError: CUDA was asked for and is not there, or has fewer devices than this host has ranks.
    """
    available = torch.cuda.is_available() if name != "cpu" else False
    if name == "cuda" and not available:
        raise LaunchError(
            "backend.options.device: 'cuda' was asked for, but torch sees no CUDA device; use 'cpu' or 'auto', or "
            "check the driver and CUDA_VISIBLE_DEVICES"
        )
    if not available:
        if keep:
            keep_memory()
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"rank {local_rank} of this host has no CUDA device: there are {torch.cuda.device_count()}; "
            f"use --nproc-per-node {torch.cuda.device_count()} or backend.options.device: cpu"
        )
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", local_rank)


def keep_memory() -> None:
    """Ask glibc to keep what is freed: the tensors of a step on CPU are as large as those of the step before.

    By default it returns big blocks to the kernel, which clears them page by page when the next step asks again: a tenth to
    a quarter of YOLOv5n's step. Nothing happens with another C library.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc takes
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process on its device: allocated on CUDA, the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
