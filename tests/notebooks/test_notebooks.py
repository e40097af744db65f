"""The notebooks of examples/notebooks, executed in real kernels as a reader executes them."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.kernels import execute, texts

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def executed(name: str, folder: Path) -> list[Any]:
    """Execute a notebook in ``folder``; return its cells of code with their outputs. An error in a cell is raised."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    execute(notebook, folder=folder)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        progress = [output for output in cell.outputs if "<progress" in output.get("data", {}).get("text/html", "")]
        assert len(progress) <= 1, "a job has one output, however long it takes"
        if "mtrain.train(" in cell.source or "mtrain.run(" in cell.source:
            assert progress
    return cells


@pytest.mark.job
def test_the_first_notebook_trains_draws_and_names_digits(tmp_path):
    cells = executed("1-first-training.ipynb", tmp_path)
    assert "finished, 110 of 110 updates" in texts(cells[0])[-1]
    assert texts(cells[1], "image/png")
    assert "metrics.accuracy" in texts(cells[2], "text/html")[0]
    right, _, total = texts(cells[4])[0].split()[:3]
    assert (int(right) >= 14, total) == (True, "20")
    assert "step-000000" in texts(cells[5])[0]


@pytest.mark.slow
def test_the_second_notebook_trains_a_model_and_a_script_of_its_own(tmp_path):
    cells = executed("2-your-own-model-and-data.ipynb", tmp_path)
    assert "did you mean 'epochs'?" in texts(cells[1])[0]
    assert "finished, 45 of 45 updates, ddp on 2 ranks" in texts(cells[2])[-1]
    assert "accuracy" in texts(cells[4])[-1]


@pytest.mark.slow
def test_the_third_notebook_compares_backends_and_resumes(tmp_path):
    cells = executed("3-backends-and-resuming.ipynb", tmp_path)
    assert texts(cells[0])[-1] == "True"
    assert "finished, 22 of 22 updates, ddp on 2 ranks" in texts(cells[1])[-1]
    assert "finished, 44 of 44 updates, deepspeed on 2 ranks" in texts(cells[2])[-1]
    assert (tmp_path / "runs/compare/compare.html").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_without_outputs(name):
    """Outputs would grow old without notice, and make every change hard to read."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
