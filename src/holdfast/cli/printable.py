"""Texts that others have written, such as names of folders, as they can be shown on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with everything escaped that would move the cursor, ring the bell or change colours.

    >>> print(printable("step\\x1b[31m 1\\n"), printable("größe"))
    step\\x1b[31m 1\\n größe
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
