"""Notebooks that run in a real kernel, as a notebook's server runs them."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

Meanwhile = Callable[[Any], Coroutine[Any, Any, None]]
"""Called with the kernel's manager beside the cells."""


def run_cells(sources: Sequence[str], *, folder: Path, meanwhile: Meanwhile | None = None) -> list[Any]:
    """Run cells in a new kernel in ``folder``; return them with their outputs. A cell that raises an error is one of these."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    execute(notebook, folder=folder, meanwhile=meanwhile, allow_errors=True)
    return list(notebook.cells)


def execute(notebook: Any, *, folder: Path, meanwhile: Meanwhile | None = None, allow_errors: bool = False) -> None:
    """Run all cells of a notebook in a new kernel in ``folder``.

    The loop is our own: nbclient's functions without ``async`` leave theirs open, and a test that leaks fails.
    """
    asyncio.run(_execute(notebook, folder, meanwhile, allow_errors=allow_errors))


async def _execute(notebook: Any, folder: Path, meanwhile: Meanwhile | None, *, allow_errors: bool) -> None:
    metadata = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=300, resources=metadata, allow_errors=allow_errors)
    async with client.async_setup_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"}):
        task = None if meanwhile is None else asyncio.create_task(meanwhile(client.km))
        for number, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, number)
        if task is not None:
            await task


def texts(cell: Any, kind: str = "text/plain") -> list[str]:
    """Return the outputs of a cell in one form, streams included."""
    shown = [output.get("text") or output.get("data", {}).get(kind, "") for output in cell.outputs]
    return [text for text in shown if text]
