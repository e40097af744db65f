"""The page on which an image can be dropped: one HTML document that loads nothing else."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """The page and its policy."""

    html: str
    policy: str
    """Value of the header Content-Security-Policy. Only this script and this style are run."""


def content() -> Page:
    """Return the page, whose style and script are in files of their own."""
    folder = files("mtrain_deploy.serving")
    html, style, script = (folder.joinpath(f"page.{end}").read_text(encoding="utf-8") for end in ("html", "css", "js"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script), policy)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
