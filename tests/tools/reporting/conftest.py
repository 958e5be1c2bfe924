"""Tests of pages have a browser."""

from tests.browser import browser, open_page

__all__ = ["browser", "open_page"]
