"""Let Paddle's matrix products use the vector instructions of processors that are not Intel's.

Paddle's wheels bring Intel's MKL of 2019, which counts every other maker's processor among those without AVX. Its matrix
products, and with them Paddle's convolutions, then take two to three times as long.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "MKL_DEBUG_CPU_TYPE"
"""MKL up to 2020.0 reads it at its first product; later versions ignore it."""
AVX2 = "5"
"""The code for AVX2. That for AVX-512 (7) was no faster in a whole update of PP-YOLOE-s on Zen 4."""
_CPUINFO = Path("/proc/cpuinfo")


def allow(environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = _CPUINFO) -> None:
    """Set ``VARIABLE`` for this processor, unless somebody has set it; nothing is set for Intel's."""
    for name, value in wanted_variables(cpuinfo).items():
        environment.setdefault(name, value)


def wanted_variables(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """Return the variables that ``allow`` sets for this processor."""
    try:
        described = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    code = _code(described)
    return {} if code is None else {VARIABLE: code}


def _code(described: str) -> str | None:
    """Return the code of the processor that Linux describes; None: MKL chooses well by itself, or knows nothing for it."""
    pairs = (line.partition(":") for line in described.splitlines())
    first: dict[str, str] = {}
    for key, _, value in pairs:
        first.setdefault(key.strip(), value.strip())
    if first.get("vendor_id", "GenuineIntel") == "GenuineIntel":
        return None
    return AVX2 if {"avx2", "fma", "bmi1", "bmi2"} <= set(first.get("flags", "").split()) else None
