"""A browser for the tests of this folder."""

from tests.browser import browser

__all__ = ["browser"]
