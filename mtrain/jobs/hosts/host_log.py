"""The hosts of a job as they come and go: a file of the run folder that the leader writes and ``mtrain status`` reads.

A scheduler knows which hosts a job was given, and not which of them take part. Each line of ``hosts.jsonl`` is a JSON
object: an attempt that begins (``time``, ``hosts``, ``restarts``), or a host that is lost (``time``, ``lost``, ``why``).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.records.wording import local_time
from mtrain.spec import outputs
from mtrain.spec.files import open_file, parse_json_lines
from mtrain.spec.hostnames import few

FILE = "hosts.jsonl"
TAIL_BYTES = 64 << 10
"""How much is read first, from the end of the file, in bytes: twice as much as long as no attempt begins there, because a
line names all hosts of a job."""

MAX_BYTES = 16 << 20
"""Size above which old lines go when an attempt begins: an elastic job of many hosts may have any number of attempts."""


@dataclass(frozen=True, slots=True)
class HostLog:
    """The file in one run folder. A file that cannot be written ends no job."""

    run_dir: Path

    def began(self, hosts: Sequence[str], *, restarts: int) -> None:
        """Note the hosts that take part from now on. Of a file that has become long, the older half of the lines goes first."""
        with contextlib.suppress(OSError):
            self._forget_old()  # Here alone: in the middle of an attempt, a reader may look for the line with its hosts.
        self._add({"hosts": list(hosts), "restarts": restarts})

    def lost(self, host: str, why: str) -> None:
        """Note that a host takes part no longer."""
        self._add({"lost": host, "why": why})

    def _add(self, fields: dict[str, Any]) -> None:
        outputs.add_json_line(self.run_dir / FILE, fields)

    def _forget_old(self) -> None:
        path = self.run_dir / FILE
        with open_file(path) as file:
            if file.seek(0, 2) <= MAX_BYTES:
                return
            file.seek(-MAX_BYTES // 2, 2)
            _, _, content = file.read().partition(b"\n")
        outputs.write_bytes(path, content)

    def read(self) -> dict[str, Any]:
        """Return the hosts that take part, how often the job was started again, and the last losses; empty: not known.

        Keys: ``hosts``, those of the last attempt that were not lost; ``restarts``; ``lost``, a list of the last three
        losses with ``time``, ``lost`` and ``why``.
        """
        lines = self._tail()
        begins = [number for number, line in enumerate(lines) if "hosts" in line]
        if not begins:
            return {}
        last = lines[begins[-1]]
        gone = {line["lost"] for line in lines[begins[-1] :] if "lost" in line}
        return {
            "hosts": [host for host in last["hosts"] if host not in gone],
            "restarts": last.get("restarts", 0),
            "lost": [line for line in lines if "lost" in line][-3:],
        }

    def _tail(self) -> list[dict[str, Any]]:
        """Return the last lines that are whole, from at least the last attempt on."""
        tail_bytes = TAIL_BYTES
        try:
            with open_file(self.run_dir / FILE) as file:
                size_bytes = file.seek(0, 2)
                while True:
                    file.seek(max(0, size_bytes - tail_bytes))
                    lines = [line for line in parse_json_lines(file.read()) if _is_known(line)]
                    # A line names all hosts of a job, so an attempt of a thousand may begin far from the end of the file.
                    if tail_bytes >= min(size_bytes, 2 * MAX_BYTES) or any("hosts" in line for line in lines):
                        return lines
                    tail_bytes *= 2
        except OSError:
            return []


def _is_known(line: dict[str, Any]) -> bool:
    """Return whether a line is one that a job writes."""
    hosts, restarts = line.get("hosts", []), line.get("restarts", 0)
    are_hosts = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts) and isinstance(restarts, int)
    return are_hosts and isinstance(line.get("lost", ""), str)


def words(known: dict[str, Any]) -> list[str]:
    """Return what ``HostLog.read`` has found as lines for people."""
    if not known:
        return []
    again = (
        f", started again {known['restarts']} time{'s' if known['restarts'] > 1 else ''}" if known["restarts"] else ""
    )
    lines = [f"takes part: {few(known['hosts']) or 'no host'}{again}"]
    for loss in known["lost"]:
        lines.append(f"lost {local_time(loss['time'])}: {loss['lost']}: {loss.get('why', '')}")
    return lines
