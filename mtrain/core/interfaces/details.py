"""Charts and matrices of counts by which a task describes an evaluation beyond its metrics, for pages.

They are written as JSON when a job ends and read back by pages, which know no task. The models refuse a file that
somebody has changed into something else.
"""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict


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
