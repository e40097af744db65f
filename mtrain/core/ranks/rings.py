"""Reckon how many bytes a rank sends in collectives that are carried by rings, as those of gloo, NCCL and Horovod are."""


def reduce_scatter(whole_bytes: float, *, size: int, on_cpu: bool) -> float:
    """Return what each of ``size`` ranks sends to get its part of the sum of arrays of ``whole_bytes``."""
    # gloo, which connects ranks on CPUs, adds everything up on every rank, and drops what belongs to others.
    return (2 if on_cpu else 1) * (size - 1) / size * whole_bytes
