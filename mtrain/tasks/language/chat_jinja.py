"""The tag of chat templates that Jinja does not know: ``{% generation %}`` around what an assistant says."""

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    """Show what stands inside the tag. mtrain finds what is learned by comparing texts, in templates without it too."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> Any:
        """Return the nodes inside the tag."""
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside, lineno=line)
