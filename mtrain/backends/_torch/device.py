"""Choose and describe the device of one rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

from mtrain.backends.base import DeviceName, DeviceOptions, uses_cuda
from mtrain.system.memory import peak_resident_bytes


def choose(name: DeviceName, *, local_rank: int, tf32: bool, keep: bool) -> torch.device:
    """Choose this rank's device and make it the current one.

    Args:
        name: ``auto`` is CUDA where there is a device, else the CPU.
        local_rank: Number of this rank on its host, which is the number of its CUDA device.
        tf32: Allow TensorFloat-32 in products and convolutions.
        keep: On the CPU, keep freed memory for the next update, or return it, see ``system.memory``.

    Raises:
        LaunchError: CUDA was requested and is not available, or has fewer devices than this host has ranks.
    """
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    advice = "the driver and CUDA_VISIBLE_DEVICES"
    if not uses_cuda(name, count=count, local_rank=local_rank, keep=keep, framework="torch", advice=advice):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", local_rank)


def of_this_rank(options: DeviceOptions) -> torch.device:
    """Choose the device of a rank that a launcher has started, see ``choose``."""
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    return choose(options.device, local_rank=local_rank, tf32=options.tf32, keep=options.keep_memory)


def describe(device: torch.device) -> str:
    """Return the device's name for display: ``cpu``, or ``cuda:1 (NVIDIA H100)``."""
    return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def fast_bf16(device: torch.device) -> bool:
    """Return whether the device has matrix units for bf16: CUDA from compute capability 8.0 (Ampere) on.

    Older GPUs emulate it, and a CPU with AVX-512 took 1.5 times as long for YOLOv5n (docs/performance.md).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory on its device: allocated bytes on CUDA, the resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of the device that this process has or could have; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, and with as many as before afterwards: how a sum is rounded depends on their number."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def seed_generators(device: torch.device, value: int) -> None:
    """Seed the random generators of the CPU and of ``device``."""
    # torch.manual_seed also formats a call stack for every device type that is not in use: 0.3 ms per update.
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
