"""HTML for notebooks and pages, in which everything that users have named is escaped."""

from collections.abc import Sequence
from html import escape
from importlib import resources


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells of text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def document(title: str, body: str) -> str:
    """Return a whole page that needs no other file; ``body`` is HTML."""
    style = (resources.files("mtrain.records") / "page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def grid(images: Sequence[str]) -> str:
    """Return drawings side by side; nothing where there is none."""
    return f'<div class="images">{"".join(f"<figure>{image}</figure>" for image in images)}</div>' if images else ""
