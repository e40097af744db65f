"""Run every benchmark and print one table: ``make bench`` or ``python -m benchmarks [name ...]``."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (
    "trainer",
    "frameworks",
    "loader",
    "startup",
    "cpu_settings",
    "batchnorm_cost",
    "small_jobs",
    "script_overhead",
)
"""Each script takes ``--json FILE`` and writes a list of rows: name, ours, peer, unit, ratio, target, better ("lower"
or "higher"); a target of None judges nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=[])
    rows = [row for name in parser.parse_args().names or NAMES for row in measured(name)]
    print(f"\n{'benchmark':<44}{'ours':>12}{'peer':>12}  {'unit':<10}{'ratio':>7}  target")
    for row in rows:
        print(
            f"{row['name']:<44}{row['ours']:>12.2f}{row['peer']:>12.2f}  {row['unit']:<10}{row['ratio']:>7.2f}  "
            f"{verdict(row)}"
        )
    return 0


def verdict(row: dict) -> str:
    """Return the target and whether it was reached; "-" for a row without a target."""
    if row["target"] is None:
        return "-"
    lower = row["better"] == "lower"
    reached = row["ratio"] <= row["target"] if lower else row["ratio"] >= row["target"]
    return f"{'<=' if lower else '>='} {row['target']:.2f} {'reached' if reached else 'NOT REACHED'}"


def measured(name: str) -> list[dict]:
    """Run one benchmark in its own process and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        print(f"== {name}", flush=True)
        env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--json", str(target)], check=True, env=env)
        return json.loads(target.read_text())


if __name__ == "__main__":
    sys.exit(main())
