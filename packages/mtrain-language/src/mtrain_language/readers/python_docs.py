"""The docstrings of Python's standard library: texts that are on every machine."""

import ast
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.errors import DataError
from mtrain.spec.collector import pause
from mtrain_language.documents import Document, Documents

SHORTEST = 60
"""Letters of the shortest docstring that is taken."""
HELD_BACK = 20
"""One docstring of so many is for evaluation."""
_HOLDERS = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""Nodes that have, or hold what has, a docstring."""


class PythonDocs(Dataset):
    """The ``python_docs`` data set plugin: docstrings of the modules at the top of the standard library.

    Every twentieth one is for evaluation. They differ between versions of Python.
    """

    kind: ClassVar[str] = "language"

    def read(self, request: SplitRequest) -> Documents:
        """Read the docstrings of one split.

        Raises:
            DataError: The interpreter has no sources.
        """
        folder = Path(sysconfig.get_paths()["stdlib"])
        texts = [text for file in sorted(folder.glob("*.py")) for text in _docstrings(file)]
        if not texts:
            raise DataError(f"data.format: python_docs: {folder} holds no sources; give texts with data.format=text")
        held_back = {number for number in range(len(texts)) if number % HELD_BACK == 0}
        wanted = set(range(len(texts))) - held_back if request.split == "train" else held_back
        if request.split == "all":
            wanted = set(range(len(texts)))
        return Documents([Document(text) for number, text in enumerate(texts) if number in wanted])


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with pause():
            nodes: deque[ast.AST] = deque([ast.parse(file.read_bytes())])
    except (OSError, SyntaxError, ValueError):
        return
    while nodes:  # as `ast.walk` does, but not into expressions, which have no docstrings
        node = nodes.popleft()
        nodes.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLDERS))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST:
                yield text
