"""Build the distributions of a checkout as `scripts/dist` does: each wheel from what its source distribution holds.

``python -m tests.distribution.building CHECKOUT OUT`` prints where they are. All are built by one process, in copies of it that have
imported setuptools already: nine starts of a build frontend take several times as long.
"""

import os
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.sources import PACKAGES, ROOT

NAMES = ("mtrain", *PACKAGES)
"""Modules of the distributions that are published; each has the name of its distribution, but for hyphens."""


class Built(NamedTuple):
    """What is published of one distribution."""

    sdist: Path
    wheel: Path


def sources() -> list[str]:
    """Return the files of the checkout: tracked ones, and those that could be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def copy_checkout(folder: Path) -> Path:
    """Copy the checkout's files without its caches and former builds, and return the copy."""
    for name in sources():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


def project(checkout: Path, name: str) -> Path:
    """Return the folder of a distribution."""
    return checkout if name == "mtrain" else checkout / "packages" / name.replace("_", "-")


def build_all(checkout: Path, out: Path) -> dict[str, Built]:
    """Build all distributions of a copy of the checkout into a folder for each."""
    command = [sys.executable, "-m", "tests.distribution.building", str(checkout), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in NAMES:
        (sdist,), (wheel,) = (out / name).glob("*.tar.gz"), (out / name).glob("*.whl")
        found[name] = Built(sdist, wheel)
    return found


def _in_a_copy(folder: Path, build: Callable[[], object]) -> None:
    """Run a function of a build in a copy of this process, in a folder; it changes much of setuptools' state."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.chdir(folder)
            build()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"{folder} could not be built")


def _build(source: Path, out: Path) -> None:
    from setuptools import build_meta

    out.mkdir(parents=True)
    _in_a_copy(source, lambda: build_meta.build_sdist(str(out)))
    (sdist,) = out.iterdir()
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.3
        archive.extractall(out / "unpacked")
    (unpacked,) = (out / "unpacked").iterdir()
    _in_a_copy(unpacked, lambda: build_meta.build_wheel(str(out)))


if __name__ == "__main__":
    for each in NAMES:
        _build(project(Path(sys.argv[1]), each), Path(sys.argv[2]).resolve() / each)
