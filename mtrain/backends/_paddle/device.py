"""Choose and describe the device of one rank."""

import paddle

from mtrain.backends._paddle import internals
from mtrain.backends.base import DeviceName, uses_cuda
from mtrain.system.memory import peak_resident_bytes


def choose(name: DeviceName, *, local_rank: int, tf32: bool, keep: bool) -> str:
    """Choose this rank's device, make it the current one, and return its name in Paddle (``cpu``, ``gpu:1``).

    Args:
        name: ``auto`` is CUDA where there is a device, else the CPU.
        local_rank: Number of this rank on its host, which is the number of its CUDA device.
        tf32: Allow TensorFloat-32 in products and convolutions.
        keep: On the CPU, keep freed memory for the next update, or return it, see ``system.memory``.

    Raises:
        LaunchError: CUDA was requested and is not available, or has fewer devices than this host has ranks.
    """
    count = paddle.device.cuda.device_count() if name != "cpu" and paddle.device.is_compiled_with_cuda() else 0
    advice = "the driver, CUDA_VISIBLE_DEVICES and that paddlepaddle-gpu is installed"
    if not uses_cuda(name, count=count, local_rank=local_rank, keep=keep, framework="paddle", advice=advice):
        paddle.device.set_device("cpu")
        return "cpu"
    device = f"gpu:{local_rank}"
    paddle.device.set_device(device)
    internals.use_tf32(tf32)
    return device


def describe(device: str) -> str:
    """Return the device's name for display: ``cpu``, or ``cuda:1 (NVIDIA H100)``."""
    if device == "cpu":
        return device
    number = int(device.partition(":")[2])
    return f"cuda:{number} ({paddle.device.cuda.get_device_name(number)})"


def fast_bf16(device: str) -> bool:
    """Return whether the device has matrix units for bf16: CUDA from compute capability 8.0 (Ampere) on."""
    if device == "cpu":
        return False
    major, minor = paddle.device.cuda.get_device_capability(int(device.partition(":")[2]))
    return (major, minor) >= (8, 0)


def peak_memory_bytes(device: str) -> int:
    """Return this process's peak memory on its device: allocated bytes on CUDA, the resident set on the CPU."""
    if device != "cpu":
        return int(paddle.device.cuda.max_memory_allocated(device))
    return peak_resident_bytes()


def free_memory_bytes(device: str) -> int | None:
    """Return the memory of the device, which other processes may use a part of; None on the CPU."""
    if device == "cpu":
        return None
    return int(paddle.device.cuda.get_device_properties(device).total_memory)


def seed_generators(device: str, value: int) -> None:
    """Seed Paddle's random generators, those of ``device`` included."""
    paddle.seed(value)
