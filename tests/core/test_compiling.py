"""Where kernels cannot be compiled, callers hear why; a library that others could have written is never loaded."""

import os
from pathlib import Path

import pytest

from mtrain.core import compiling
from mtrain.models.common import nms
from tests.backends.compiler import needs_a_compiler


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as containers have that run under any number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@needs_a_compiler
@pytest.mark.usefixtures("_homeless")
def test_a_user_without_a_home_is_told_so_and_boxes_are_suppressed_by_numpy() -> None:
    with pytest.raises(compiling.CannotCompileError, match="XDG_CACHE_HOME"):
        compiling.compile_library(nms.SOURCE)
    assert nms.load_greedy.__wrapped__() is None


def test_a_compiler_that_is_no_command_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '-O2")
    with pytest.raises(compiling.CannotCompileError, match="CC is no command"):
        compiling.compile_library(nms.SOURCE)


@needs_a_compiler
def test_a_library_that_others_can_write_to_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n", encoding="utf-8")
    former = os.umask(0)
    try:
        library = compiling.compile_library(source)
    finally:
        os.umask(former)
    assert library.stat().st_mode & 0o077 == 0
    right = library.read_bytes()
    library.write_bytes(b"another's")
    library.chmod(0o777)
    assert compiling.compile_library(source).read_bytes() == right
