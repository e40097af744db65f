"""Read from the Linux kernel how many bytes this process has sent over TCP."""

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
"""Offset of ``tcpi_bytes_acked`` in the kernel's ``struct tcp_info`` (linux/tcp.h, since version 4.1), in bytes."""
_INFO_BYTES = 192
_OPEN_FILES = Path("/proc/self/fd")


def sent_bytes() -> int | None:
    """Return the bytes that have arrived at the other ends of this process's open TCP connections.

    It is None if the kernel does not count them. Traffic through shared memory or past the kernel (NCCL between devices
    of one machine, InfiniBand) is not included.
    """
    if not hasattr(socket, "TCP_INFO") or not _OPEN_FILES.is_dir():
        return None
    total = 0
    for entry in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # The file was closed meanwhile, or is not a TCP connection.
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                total += _count_acknowledged(int(entry))
    return total


def _count_acknowledged(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    acked: int = _ACKED.unpack_from(info, _ACKED_AT)[0] if len(info) >= _ACKED_AT + _ACKED.size else 0
    return acked
