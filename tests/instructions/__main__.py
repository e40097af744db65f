"""Count the instructions of parts of mtrain, which the load of the machine does not change, and compare them with a file.

``python -m tests.instructions`` runs each program of ``parts.py`` under callgrind and prints the difference from
``counts.json``; exit code 1: a part needs more than ``TOLERANCE`` more than it did. ``--record`` writes the file.

Counts depend on the versions of Python and of libraries, and on the instructions that the processor has. Libraries are
told to use the oldest they can (``FIXED``). A count that was made with other versions is not compared.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "counts.json"
PROGRAMS = {
    "plan": ("plan",), "loader": ("loader", "windows"), "rank": ("startup", "update"), "session": ("plain_loop", "session"),
    "scoring": ("scoring",),
}  # fmt: skip
"""Program of ``parts.py`` -> the parts that it counts."""
LIBRARIES = ("faster-coco-eval", "numpy", "opencv-python-headless", "pydantic", "simplejpeg", "torch")
TOLERANCE = 0.02
"""Largest part of a count by which it may grow."""
CONTROL = "plain_loop"
"""The part that has nothing of mtrain: a machine on which it differs counts otherwise, and is not compared."""
FIXED = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F",
    "OPENCV_CPU_DISABLE": "AVX,AVX2,FP16,FMA3,AVX512-SKX",
    "OPENCV_IPP": "disabled",
    "JSIMD_FORCESSE2": "1",
}
"""Variables that keep libraries from choosing code by the processor, or by chance."""


def main() -> int:
    """Count, print, and compare or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []], default=[])
    parser.add_argument("--record", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "counts": {}}
    counts: dict[str, int] = {}
    for program in arguments.programs or PROGRAMS:
        counts |= count(program)
    if arguments.record:
        kept = known["counts"] if known["versions"] == versions() else {}
        FILE.write_text(json.dumps({"versions": versions(), "counts": {**kept, **counts}}, indent=1) + "\n")
    lines, worse = compared(counts, known, versions())
    print("\n".join(lines))
    return 1 if worse and not arguments.record else 0


def count(program: str) -> dict[str, int]:
    """Return the instructions of each part of a program.

    Raises:
        RuntimeError: the program, or callgrind, has failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = folder / "marks.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(HERE / "marks.c"), "-o", str(library)], check=True)
        (folder / "data").mkdir()
        argv = [sys.executable, str(HERE / "parts.py"), program, str(library), str(folder / "data")]
        variables = {**environ(), **kernels_in(folder)}
        # Once without callgrind: what Python compiles and libraries store at their first use is no part of a count.
        subprocess.run(argv, env={**variables, "PYTHONDONTWRITEBYTECODE": ""}, capture_output=True, check=False)
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", "--quiet"]
        ended = subprocess.run([*tool, *argv], env=variables, capture_output=True, text=True, check=False)
        found = read(sorted(folder.glob("out*")))
        if ended.returncode or set(found) != set(PROGRAMS[program]):
            raise RuntimeError(
                f"{program}: exit code {ended.returncode}, parts {sorted(found)}\n{ended.stderr[-2000:]}"
            )
        return found


def kernels_in(folder: Path) -> dict[str, str]:
    """Return variables with which mtrain's kernels are compiled into ``folder``, for the oldest processor of this kind.

    Those of the user are made for the processor at hand, and callgrind does not know the newest instructions.
    """
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -march=x86-64 -mtune=generic\n')
    compiler.chmod(0o700)
    return {"CC": str(compiler), "XDG_CACHE_HOME": str(folder / "cache")}


def environ() -> dict[str, str]:
    """Return the environment of a counted program: nothing of the caller's but what finds programs."""
    return {**{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}, **FIXED}


def read(files: Sequence[Path]) -> dict[str, int]:
    """Return the totals of callgrind's files by the names of their parts."""
    found = {}
    for file in files:
        text = file.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (\w+)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if name and total:
            found[name[1]] = int(total[1])
    return found


def versions() -> dict[str, str]:
    """Return the versions on which counts depend."""
    installed = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    return {"python": platform.python_version(), "machine": platform.machine()} | {
        name: installed.get(name, "") for name in LIBRARIES
    }


def compared(counts: Mapping[str, int], known: Mapping[str, Any], now: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return lines for people, and whether a part needs more than it may."""
    differing = [
        f"{key} {known['versions'].get(key) or 'none'} -> {now[key]}"
        for key in now
        if known["versions"].get(key) != now[key]
    ]
    lines, worse = [], False
    of_control = known["counts"].get(CONTROL)
    if of_control and abs(change := counts.get(CONTROL, of_control) / of_control - 1) > TOLERANCE:
        differing.append(f"{CONTROL}, in which nothing is mtrain's, by {change:+.2%}")
    for name, actual in counts.items():
        before = known["counts"].get(name)
        if before is None or differing:
            lines.append(f"{name:<10}{actual:>16,}  not compared")
            continue
        change = actual / before - 1
        too_many = change > TOLERANCE
        worse |= too_many
        lines.append(f"{name:<10}{actual:>16,}  {change:+.2%}{'  TOO MANY' if too_many else ''}")
    if differing:
        lines.append(
            f"counts.json is of another machine or other versions: {', '.join(differing)}; `make instructions-record` writes it anew"
        )
    return lines, worse


if __name__ == "__main__":
    sys.exit(main())
