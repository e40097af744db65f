"""HTML for notebooks, in which everything that users have named is escaped."""

from collections.abc import Sequence
from html import escape


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells of text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
