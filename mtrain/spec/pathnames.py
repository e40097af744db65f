"""Text that can be the path of a file. No file system takes any other, and most calls that try raise an error of their own."""

from typing import Annotated

from pydantic import AfterValidator

MAX_BYTES = 4095
"""Longest path on Linux, in bytes."""
MAX_PART_BYTES = 255
"""Longest name of a file or folder, in bytes."""


def checked_path(text: str) -> str:
    """Return a path as it is.

    Raises:
        ValueError: No file can have it.
    """
    problem = problem_of(text)
    if problem:
        raise ValueError(f"given {text[:60]!r}, {problem}; give the path of a file or folder")
    return text


def problem_of(text: str) -> str:
    """Return why text can be no path; empty if it can."""
    if "\0" in text:
        return "which holds a null character"
    content = text.encode(errors="surrogatepass")
    longest = max(map(len, content.split(b"/")))
    if longest > MAX_PART_BYTES or len(content) > MAX_BYTES:
        return f"of {len(content)} bytes, more than a path ({MAX_BYTES}) or a name in it ({MAX_PART_BYTES}) has"
    return ""


PathText = Annotated[str, AfterValidator(checked_path)]
"""Path of a file or folder in a spec."""
