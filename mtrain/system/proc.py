"""What Linux tells of a process in its tables below /proc."""

from pathlib import Path

PROC = Path("/proc")
BEGAN = 19
"""Place among the fields of ``read_stat`` of when the process started, in ticks since the machine was."""


def read_stat(pid: int, *, proc: Path = PROC) -> tuple[str, list[str]]:
    """Return the name of a process's program and the fields behind it, the state first; no fields: there is no such process."""
    try:
        head, _, rest = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")
    except OSError:
        return "", []
    return head.partition("(")[2], rest.split()


def read_status(pid: int, *, proc: Path = PROC) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name; empty: there is no such process."""
    try:
        text = (proc / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
