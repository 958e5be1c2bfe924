"""What a live object has at present, put where nothing was loaded for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.formats.native.refs import ANYTHING

_ABSENT = object()


def with_present(loaded: Any, present: Callable[[], Any]) -> Any:
    """What was loaded, without gaps. The present state is asked for only if there are any.

    >>> with_present({"step": ANYTHING, "rate": 0.1}, lambda: {"step": 7, "rate": 0.5})
    {'step': 7, 'rate': 0.1}
    """
    return _filled_up(loaded, present()) if _has_gaps(loaded) else loaded


def _has_gaps(loaded: Any) -> bool:
    if isinstance(loaded, Mapping):
        return any(map(_has_gaps, loaded.values()))
    return loaded is ANYTHING or (isinstance(loaded, (list, tuple)) and any(map(_has_gaps, loaded)))


def _filled_up(loaded: Any, present: Any) -> Any:
    if loaded is ANYTHING:
        return present
    if isinstance(loaded, dict):
        known = present if isinstance(present, Mapping) else {}
        made = copy.copy(loaded)
        for key, child in loaded.items():
            made[key] = _filled_up(child, known.get(key, _ABSENT))
            if made[key] is _ABSENT:
                del made[key]
        return made
    if isinstance(loaded, (list, tuple)):
        beside = list(present) if isinstance(present, (list, tuple)) else []
        beside += [_ABSENT] * (len(loaded) - len(beside))
        filled = [_filled_up(*pair) for pair in zip(loaded, beside, strict=False)]
        # Positions must not move, so None stands where there is nothing at present either.
        kept: Any = [None if child is _ABSENT else child for child in filled]
        kind: Any = type(loaded)
        return kind(*kept) if hasattr(kind, "_fields") else kind(kept)
    return loaded
