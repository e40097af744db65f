"""Read the charts and matrices of an evaluation, which anybody may have changed since a job wrote them."""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mtrain.core.interfaces.details import Detail, Matrix

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
