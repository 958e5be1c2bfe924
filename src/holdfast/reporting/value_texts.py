"""Values as short texts, however large they are."""

from __future__ import annotations

import reprlib
from typing import Any

_LONGEST = 200

_short = reprlib.Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = 12
_short.maxstring = _short.maxother = _LONGEST
_short.maxlevel = 4


def type_and_text(value: Any) -> tuple[str, str]:
    """The name of a value's type, and the beginning of how Python writes it.

    >>> type_and_text([1, 2]), type_and_text("a" * 1000)[1][:10]
    (('list', '[1, 2]'), "'aaaaaaaaa")
    """
    text = _short.repr(value)
    return type(value).__name__, text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
