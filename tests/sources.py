"""The source, parsed once for all tests of a process that look for something in it."""

import ast
import gc
from functools import cache
from pathlib import Path

from mtrain.spec.collector import paused


@cache
def python_files(folder: Path) -> tuple[Path, ...]:
    """Return all files of Python in a folder and below it, in order."""
    return tuple(sorted(folder.rglob("*.py")))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, the module first, in the order of `ast.walk`; nobody may change them."""
    with paused():
        found = tuple(ast.walk(ast.parse(file.read_bytes())))
        gc.freeze()  # they stay, and are hundreds of thousands
    return found
