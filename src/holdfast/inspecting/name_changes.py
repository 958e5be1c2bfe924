"""Finds out how names have changed, from keys that are missed and keys that are left over."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TypeAlias

Shape: TypeAlias = "tuple[int, ...] | None"

_MOST_CANDIDATES = 64
"""Keys with the same last part that are looked at for each missing one."""
_MOST_RENAMES = 5
_ALIKE = 0.6


def likely_renames(missing: Mapping[str, Shape], left: Mapping[str, Shape]) -> dict[str, str]:
    """Which beginnings of keys were probably replaced, as ``load`` takes them for ``rename``.

    >>> likely_renames({"net.0.w": (2,), "net.1.w": (2,)}, {"model.net.0.w": (2,), "model.net.1.w": (2,)})
    {'model': ''}
    >>> likely_renames({"decoder.w": (2,)}, {"encoder.w": (3,)})
    {}
    """
    by_last: dict[str, list[str]] = defaultdict(list)
    for key in left:
        by_last[key.rpartition(".")[2]].append(key)
    wanted, free = dict(missing), dict(left)
    renames: dict[str, str] = {}
    while wanted and len(renames) < _MOST_RENAMES:
        found = _most_common_change(wanted, free, by_last)
        if found is None:
            break
        old, new = found
        moved = {_replaced(key, old, new): key for key in free if _has_prefix(key, old)}
        helped = [key for key in wanted if key in moved and wanted[key] == free[moved[key]]]
        if not helped:
            break
        renames |= _as_argument(old, new, [moved[key] for key in helped])
        for key in helped:
            del wanted[key], free[moved[key]]
    return renames


def _most_common_change(
    wanted: Mapping[str, Shape], free: Mapping[str, Shape], by_last: Mapping[str, list[str]]
) -> tuple[str, str] | None:
    votes: Counter[tuple[str, str]] = Counter()
    for key, shape in wanted.items():
        candidates = [other for other in by_last.get(key.rpartition(".")[2], ()) if free.get(other, ()) == shape]
        for other in [other for other in candidates if other in free][:_MOST_CANDIDATES]:
            votes[_unlike_heads(other, key)] += 1
    if votes:
        # Of changes that explain as much, the shorter one is meant.
        return min(votes, key=lambda change: (-votes[change], len(change[0]) + len(change[1])))
    return _most_alike(wanted, free)


def _most_alike(wanted: Mapping[str, Shape], free: Mapping[str, Shape]) -> tuple[str, str] | None:
    """A single key that was given another name at its end."""
    for key, shape in list(wanted.items())[:_MOST_CANDIDATES]:
        candidates = [other for other in free if free[other] == shape][: _MOST_CANDIDATES * 8]
        near = difflib.get_close_matches(key, candidates, n=1, cutoff=_ALIKE)
        if near:
            return near[0], key
    return None


def _unlike_heads(old: str, new: str) -> tuple[str, str]:
    """The keys without the parts at their ends that they have in common."""
    olds, news = old.split("."), new.split(".")
    while olds and news and olds[-1] == news[-1]:
        olds.pop()
        news.pop()
    return ".".join(olds), ".".join(news)


def _has_prefix(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _replaced(key: str, old: str, new: str) -> str:
    rest = key[len(old) :].removeprefix(".") if old else key
    return ".".join(part for part in (new, rest) if part)


def _as_argument(old: str, new: str, moved: list[str]) -> dict[str, str]:
    """A change as ``rename`` takes it. What gets a prefix where it had none is named by its first parts."""
    if old:
        return {old: new}
    return {first: f"{new}.{first}" for first in dict.fromkeys(key.partition(".")[0] for key in moved)}
