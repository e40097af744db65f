"""Charts and matrices of counts by which a task describes an evaluation beyond its figures, for pages.

They are written as JSON when a job ends and read back by pages, which know no task. The models refuse a file that
somebody has changed into something else.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

if TYPE_CHECKING:  # reading a spec needs tasks, but not numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_CLASSES = 40
"""Largest number of classes of a matrix that have a row of their own."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Series(_Part):
    """One curve of a chart."""

    label: str
    x: list[float]
    """Ascending."""
    y: list[float | None]
    """As many as ``x``; None: no value there."""


class Chart(_Part):
    """Curves over a quantity, such as precision over recall."""

    kind: Literal["chart"] = "chart"
    title: str
    note: str = ""
    x_title: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    series: list[Series]


class Matrix(_Part):
    """Counts by two classes, such as true and predicted ones."""

    kind: Literal["matrix"] = "matrix"
    title: str
    note: str = ""
    rows_title: str
    columns_title: str
    rows: list[str]
    columns: list[str]
    counts: list[list[int]]
    """A list of the counts of each row; one for each of ``columns``."""


Detail: TypeAlias = Chart | Matrix
_DETAILS: TypeAdapter[list[Detail]] = TypeAdapter(list[Annotated[Detail, Field(discriminator="kind")]])


def read_details(values: Any) -> list[Detail]:
    """Return details from the values of a JSON file.

    Raises:
        ValueError: they are something else, or do not fit together.
    """
    details = _DETAILS.validate_python(values)
    for detail in details:
        if isinstance(detail, Matrix):
            whole = len(detail.counts) == len(detail.rows) and {len(r) for r in detail.counts} <= {len(detail.columns)}
        else:
            whole = all(len(series.x) == len(series.y) for series in detail.series)
        if not whole:
            raise ValueError(f"{detail.title}: the lengths of its lists do not fit together")
    return details


def confusion(
    title: str, names: Sequence[str], counts_CC: "NDArray[np.int64]", *, unit: str, absent: str | None = None
) -> Matrix:
    """Return the matrix of true (rows) and predicted classes (columns).

    Of many classes only those that occur most often get rows of their own; the rest is added up in one.

    Args:
        title: Heading of the matrix.
        names: Names of the classes.
        counts_CC: Number of samples by true and predicted class; with ``absent`` one row and column more.
        unit: What is counted, in the plural.
        absent: Name of the last row and column, of samples without a class on one side; None: there is none.
    """
    import numpy as np

    count = len(names)
    note = f"number of {unit}; in a row, the {unit} of one true class"
    labels = [*names, *([absent] if absent else [])]
    if count > MAX_CLASSES:
        frequency = counts_CC.sum(axis=1)[:count]
        kept = np.sort(np.argsort(-frequency, kind="stable")[:MAX_CLASSES])
        groups = np.full(len(labels), MAX_CLASSES)
        groups[kept] = np.arange(MAX_CLASSES)
        if absent:
            groups[count] = MAX_CLASSES + 1
        reduced = np.zeros((MAX_CLASSES + 1 + bool(absent),) * 2, dtype=np.int64)
        np.add.at(reduced, (groups[:, None], groups[None, :]), counts_CC)
        counts_CC = reduced
        labels = [names[i] for i in kept] + [f"{count - MAX_CLASSES} other classes", *([absent] if absent else [])]
    return Matrix(
        title=title,
        note=note,
        rows_title="true",
        columns_title="predicted",
        rows=labels,
        columns=labels,
        counts=counts_CC.tolist(),
    )
