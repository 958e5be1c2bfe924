"""Lists and values in a few words, for messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def some_of(texts: Sequence[str], most: int = 5) -> str:
    """The first of some texts, and how many more there are.

    >>> some_of(["a", "b", "c"]), some_of(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def in_short(value: Any) -> str:
    """How Python writes a value, with the middle of long ones left out.

    >>> in_short([1, 2]), len(in_short("a" * 1000))
    ('[1, 2]', 80)
    """
    return _SHORT.repr(value)
