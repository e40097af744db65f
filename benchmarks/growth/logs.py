"""The log of a rank that prints without end: what is kept of it, and what shortening it costs the rank and the starter.

A script under ``mtrain run`` prints so many megabytes of lines as fast as it can, once with the usual ``report.log_mb`` and once with none.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = (100, 1_000, 4_000)
"""Megabytes that are printed."""
SCRIPT = """
import json, os, sys, time

def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        stat = file.read().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

import mtrain  # asks to be told when to end
lines = b"".join(b"%099d\\n" % number for number in range(1000))
starter, began, used = cpu_s(os.getppid()), time.monotonic(), time.process_time()
longest = 0.0
for _ in range(10 * int(sys.argv[1])):
    at = time.monotonic()
    os.write(1, lines)
    longest = max(longest, time.monotonic() - at)
    time.sleep(0.0005)
row = {"rank_s": time.monotonic() - began, "rank_cpu_s": time.process_time() - used, "longest_write_s": longest}
row["starter_cpu_s"] = cpu_s(os.getppid()) - starter
with open("row.json", "w") as file:
    json.dump(row, file)
"""


def measure(printed_mb: int, *, limit: str) -> dict[str, Any]:
    """Run the job with a limit of its log; return what was measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "talks.py").write_text(SCRIPT)
        options = ["--backend", "solo", "--devices", "cpu", "--name", "talks", "-o", f"report.log_mb={limit}"]
        line = [sys.executable, "-m", "mtrain", "run", *options, "talks.py", str(printed_mb)]
        subprocess.run(line, cwd=folder, check=True, capture_output=True)
        log = folder / "runs" / "talks" / "logs" / "rank-0.log"
        return {"log_mb": log.stat().st_size / 1e6, **json.loads((folder / "row.json").read_text())}


def main() -> None:
    printed_mb = int(sys.argv[-1])
    limited, whole = measure(printed_mb, limit="64"), measure(printed_mb, limit="null")
    print(json.dumps({"printed_mb": printed_mb, **limited, **{f"whole_{key}": value for key, value in whole.items()}}))


if __name__ == "__main__":
    main()
