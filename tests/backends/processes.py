"""Python in a process of its own, as a rank has it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in the root of the repository, on one thread, outside any job."""
    saved = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    argv = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(
        argv, cwd=ROOT, env={**saved, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=120
    )
