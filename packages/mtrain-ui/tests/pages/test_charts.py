"""Which points of a curve are drawn, and the numbers of a matrix."""

from collections.abc import Sequence

import numpy as np
import pytest

from mtrain.core.interfaces.details import Matrix
from mtrain.records import svg
from mtrain.records.svg import Axes, Line
from mtrain_ui.pages import charts


@pytest.fixture
def drawn_lines(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """The lines of all charts that are drawn."""
    found: list[Line] = []

    def chart(title: str, lines: Sequence[Line], axes: Axes) -> str:
        found.extend(lines)
        return ""

    monkeypatch.setattr(svg, "chart", chart)
    return found


def test_a_long_curve_is_drawn_from_its_beginning_to_its_end(drawn_lines: list[Line]) -> None:
    x = np.arange(10_000.0)
    charts.draw_curves("loss", {"total": (x, x**2)}, Axes())
    (line,) = drawn_lines
    assert line.x is not None
    assert (line.x[0], line.x[-1], len(line.x)) == (0, 9_999, charts.MAX_POINTS)
    assert np.diff(line.x).max() <= 26  # 10,000 / 400, rounded
    np.testing.assert_array_equal(line.values, line.x**2)


def test_a_short_curve_is_drawn_whole(drawn_lines: list[Line]) -> None:
    x = np.array([3.0, 5.0, 9.0])
    charts.draw_curves("loss", {"a": (x, -x), "none": (x[:0], x[:0])}, Axes())
    assert [line.values.tolist() for line in drawn_lines] == [[-3.0, -5.0, -9.0], []]


def test_a_smoothed_curve_has_the_same_mean_and_less_noise(drawn_lines: list[Line]) -> None:
    x = np.arange(300.0)
    noise = np.random.default_rng(0).normal(0, 1, 300)
    charts.draw_curves("loss", {"a": (x, 5 + noise)}, Axes(), smooth=True)
    faint, smooth = drawn_lines
    assert (faint.faint, smooth.faint) == (True, False)
    np.testing.assert_array_equal(faint.values, 5 + noise)
    assert smooth.values.mean() == pytest.approx(faint.values.mean(), abs=0.15)
    assert smooth.values[30:].std() < 0.5 * faint.values.std()


def test_the_axis_is_logarithmic_where_positive_values_span_much() -> None:
    def spans(*values: float) -> bool:
        return charts._spans({"a": (np.arange(float(len(values))), np.array(values))})

    assert [spans(1.0, 29.0), spans(1.0, 31.0), spans(0.0, 31.0), spans(-1.0, 31.0)] == [False, True, False, False]
    assert spans(float("nan"), 1.0, 31.0)


def test_a_matrix_has_the_counts_and_their_shares_of_the_row() -> None:
    matrix = Matrix(
        title="confusion",
        rows_title="true",
        columns_title="predicted",
        rows=["cat", "dog"],
        columns=["cat", "dog"],
        counts=[[3, 1], [0, 12_345]],
    )
    (grid,) = charts.grids([matrix])
    cells = [[(cell.text, cell.share, cell.right) for cell in row] for _, row in grid.rows]
    assert cells == [[("3", 15, True), ("1", 5, False)], [("", 0, False), ("12.3k", 20, True)]]
