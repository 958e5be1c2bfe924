"""Any value as JSON can have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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
