"""Fill the templates of pages. Everything that comes from a run is escaped."""

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

ASSETS = "assets"


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mtrain_ui.pages", ASSETS),
        autoescape=True,  # also for texts that no file extension tells it about
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """Return a page."""
    return _environment().get_template(template).render(**values)


@cache
def style() -> Markup:
    """Return the style sheet of all pages."""
    shared = (resources.files("mtrain.records") / "page.css").read_text(encoding="utf-8")
    return Markup(shared + render("pages.css"))  # noqa: S704 - the package's own files
