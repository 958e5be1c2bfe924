"""Lists, values and any data in a few words, for messages and for JSON."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

# Lists and values in a few words, for messages.


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


def listed(lines: Sequence[str], most: int = 20) -> list[str]:
    """The first of some lines of a message, indented, and how many more there are.

    >>> listed(["a", "b", "c"], most=1)
    ['  a', '  … and 2 more']
    """
    more = [f"  … and {len(lines) - most:,} more"] if len(lines) > most else []
    return [*(f"  {line}" for line in lines[:most]), *more]


def quoted_key(key: str) -> str:
    """A key of a state in a message. That of the state itself is empty.

    >>> quoted_key("model.weight"), quoted_key("")
    ("'model.weight'", 'the state')
    """
    return f"'{key}'" if key else "the state"


# Any value as JSON can have it.


def plain(value: Any) -> Any:
    """A value as JSON has them. Numbers that JSON has no words for, and other objects, become text.

    >>> plain({1: (2, float("nan")), "path": b"x"})
    {'1': [2, 'nan'], 'path': "b'x'"}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
