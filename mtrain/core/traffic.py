"""How much this process has sent to others, as the kernel counts it; Linux."""

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
"""Where ``tcpi_bytes_acked`` lies in the kernel's ``struct tcp_info`` (linux/tcp.h, since 4.1)."""
_INFO_BYTES = 192
_OPEN_FILES = Path("/proc/self/fd")


def sent_bytes() -> int | None:
    """Bytes that arrived at the other end of all TCP connections this process has open; None: the kernel does not tell.

    What goes through shared memory or past the kernel (NCCL between devices of one machine, InfiniBand) is not in it.
    """
    if not hasattr(socket, "TCP_INFO") or not _OPEN_FILES.is_dir():
        return None
    total = 0
    for entry in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed meanwhile, or no TCP connection
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                total += _acknowledged(int(entry))
    return total


def _acknowledged(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    acked: int = _ACKED.unpack_from(info, _ACKED_AT)[0] if len(info) >= _ACKED_AT + _ACKED.size else 0
    return acked
