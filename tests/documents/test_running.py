"""The commands of README.md and docs run as they are typed, in an empty folder, unless a comment before a block says why not."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.site import documents
from scripts.site.documents import Block
from tests.documents.test_blocks import commands

PAGES = [documents.ROOT / "README.md", *sorted((documents.ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in documents.blocks(page)
    if block.language in ("", "console") and block.not_checked is None and any(commands(block))
]


def lines(block: Block) -> Iterator[str]:
    """Yield the command lines of a block that are run."""
    for _, words in commands(block):
        line = shlex.join(words)
        if block.not_run is None or line.startswith(block.runs or ("\0",)):
            yield line


def test_every_reason_is_a_reason_and_names_commands_that_are_there() -> None:
    assert all(len(block.not_run) > 10 for block in BLOCKS if block.not_run is not None)
    for block in BLOCKS:
        typed = [shlex.join(words) for _, words in commands(block)]
        assert all(any(line.startswith(begin) for line in typed) for begin in block.runs), str(block)


@pytest.mark.job
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(block), marks=[pytest.mark.slow] if len([*lines(block)]) > 1 else [])
        for block in BLOCKS
        if any(lines(block))
    ],
)
def test_the_commands_of_a_block_run(block: Block, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    for line in lines(block):
        assert line.split()[0] == "mtrain", f"{line}: other programs are not run; mark the block"
        ended = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, f"$ {line}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        assert ended.stdout, line
