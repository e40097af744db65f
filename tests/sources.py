"""The source, parsed once for all tests of a process that look for something in it."""

import ast
import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mtrain.spec.collector import pause

ROOT = Path(__file__).parents[1]
PACKAGES = {file.parent.name: file.parent for file in sorted(ROOT.glob("packages/*/src/*/__init__.py"))}
"""Name of each package that is a distribution of its own -> its folder."""
WRITTEN = {"spec/typed.py"}
"""Files that installing mtrain writes: they are no source."""


@cache
def python_files(folder: Path) -> tuple[Path, ...]:
    """Return all files of Python in a folder and below it, in order."""
    return tuple(sorted(folder.rglob("*.py")))


@cache
def source_files(*, endings: tuple[str, ...] = (".py",), trace: bool = False) -> Mapping[str, Path]:
    """Return all files of mtrain and its packages by name: ``spec/plugins.py``, ``mtrain_deploy/exporting/job.py``.

    Args:
        endings: of the names of files.
        trace: with those of mtrain-trace, which lies below mtrain and has none of its functions.
    """
    found = {file.relative_to(ROOT / "mtrain").as_posix(): file for file in sorted((ROOT / "mtrain").rglob("*"))}
    for name, folder in PACKAGES.items():
        if trace or name != "mtrain_trace":
            found |= {file.relative_to(folder.parent).as_posix(): file for file in sorted(folder.rglob("*"))}
    return {name: file for name, file in found.items() if file.suffix in endings and name not in WRITTEN}


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, the module first, in the order of `ast.walk`; nobody may change them."""
    with pause():
        found = tuple(ast.walk(ast.parse(file.read_bytes())))
        gc.freeze()  # they stay, and are hundreds of thousands
    return found
