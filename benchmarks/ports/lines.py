"""Count the lines in which a script differs from its plain original."""

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Changes:
    """Lines of code by which a script differs from another one."""

    written: int
    """Lines that are new or altered."""
    deleted: int
    """Lines that are gone without another one in their place."""


def code_lines(path: Path) -> list[str]:
    """Return the lines of code of a script, without indentation, comments, docstrings and blank lines.

    Statements are formatted alike first, each simple statement and each head of a compound one on one line, so that
    where a long line is wrapped does not count.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def changes(before: Path, after: Path) -> Changes:
    """Count the lines that were changed to make the script ``after`` of ``before``."""
    written = deleted = 0
    matcher = difflib.SequenceMatcher(a=code_lines(before), b=code_lines(after), autojunk=False)
    for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        old, new = old_end - old_start, new_end - new_start
        if (old, new) != (0, 0) and matcher.a[old_start:old_end] != matcher.b[new_start:new_end]:
            written += new
            deleted += max(old - new, 0)
    return Changes(written, deleted)
