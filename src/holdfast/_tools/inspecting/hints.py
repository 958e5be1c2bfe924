"""What would help a checkpoint to load: other names, conversions, turned shapes. The first two are tried before."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any, TypeAlias

from holdfast._base.texts import some_of
from holdfast._formats.native.refs import TensorRef
from holdfast._load.agreement import LoadAgreement
from holdfast._load.planning import RankPlan
from holdfast._load.targets import is_target, shape_and_dtype

# Finds out how names have changed, from keys that are missed and keys that are left over.


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


_MOST_TURNED = 4
"""Dimensions up to which turned shapes are looked for: there are 24 ways to turn those."""
_MOST_NAMED = 3


@dataclass(frozen=True)
class Misfits:
    """What does not fit, as far as hints need it."""

    missing: Mapping[str, tuple[int, ...] | None]
    """With the shape that the state has there, if it is a tensor."""
    left: Mapping[str, tuple[int, ...] | None]
    """Stored keys that nothing has taken, with the shape if it is a tensor."""
    shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    dtypes: Mapping[str, tuple[str, str]]
    others: int
    """How many other problems there are."""

    @classmethod
    def of(cls, plan: RankPlan, agreement: LoadAgreement) -> Misfits:
        """What a plan and the agreement on it say."""
        problems = agreement.problems
        stored = {leaf.key: leaf.value for leaf in plan.root.leaves()}
        left = [*agreement.unexpected, *agreement.not_requested]
        return cls(
            missing={key: _shape_of(plan.found.missing.get(key)) for key in problems.missing},
            left={key: _shape_of(stored.get(key)) for key in left},
            shapes=problems.shapes,
            dtypes=problems.dtypes,
            others=len(problems.unexpected) + len(problems.kinds) + len(problems.uncovered) + len(problems.errors),
        )

    @property
    def count(self) -> int:
        """Of all problems."""
        return len(self.missing) + len(self.shapes) + len(self.dtypes) + self.others


Retry = Callable[["Mapping[str, str] | None", bool], "Misfits | None"]


def hints_for(found: Misfits, retry: Retry, *, may_rename: bool) -> list[str]:
    """All hints that help. ``retry`` finds out what would be left over with other names, or with casts."""
    hints: list[str] = []
    rename: Mapping[str, str] | None = None
    if found.missing and found.left and may_rename:
        rename = likely_renames(found.missing, found.left)
        after = retry(rename, False) if rename else None
        if after is None or len(after.missing) >= len(found.missing):
            rename = None
        else:
            helped = len(found.missing) - len(after.missing)
            hints.append(f"rename={dict(rename or {})!r} gives {_keys(helped)} what {_it(helped)}{_verdict(after)}")
            found = after
    if found.dtypes:
        kinds = Counter(f"{old} -> {new}" for old, new in found.dtypes.values())
        after = retry(rename, True)
        if after is not None and len(after.dtypes) < len(found.dtypes):
            shown = ", ".join(f"{kind} ({number:,})" for kind, number in kinds.most_common(_MOST_NAMED))
            hints.append(f"cast=True converts {shown}{_verdict(after)}")
    hints += _shape_hints(found.shapes)
    return hints


def _shape_hints(shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> list[str]:
    by_hint: dict[str, list[str]] = {}
    for key, (saved, current) in shapes.items():
        hint = _shape_hint(tuple(saved), tuple(current))
        if hint is not None:
            by_hint.setdefault(hint, []).append(key)
    return [f"{some_of(keys, _MOST_NAMED)}: {hint}" for hint, keys in by_hint.items()]


def _shape_hint(saved: tuple[int, ...], current: tuple[int, ...]) -> str | None:
    form = "transform={key: lambda checkpoint, key: checkpoint[key][:]%s}"
    if len(saved) == len(current) and saved == current[::-1]:
        how = ".T" if len(saved) == 2 else f".permute{_order(saved, current)}"
        return f"the stored shape is transposed; {form % how}"
    if len(saved) == len(current) <= _MOST_TURNED and sorted(saved) == sorted(current):
        return f"the stored dimensions are in another order; {form % f'.permute{_order(saved, current)}'}"
    if prod(saved) == prod(current):
        return f"the same number of elements in another shape; {form % f'.reshape{current}'}, if that is what is meant"
    if saved[1:] == current[1:] and saved and current:
        return f"there are {saved[0]:,} stored rows for {current[0]:,} in the state; a transform can pad or cut them"
    return None


def _order(saved: tuple[int, ...], current: tuple[int, ...]) -> tuple[int, ...]:
    """How to turn the dimensions of one shape to get another."""
    if saved == current[::-1]:
        return tuple(reversed(range(len(saved))))
    return next(order for order in permutations(range(len(saved))) if tuple(saved[dim] for dim in order) == current)


def _shape_of(thing: Any) -> tuple[int, ...] | None:
    if isinstance(thing, TensorRef):
        return thing.shape
    return tuple(shape_and_dtype(thing)[0]) if thing is not None and is_target(thing) else None


def _verdict(after: Misfits) -> str:
    return "; then it would load" if not after.count else f"; {after.count:,} other problem(s) stay"


def _keys(count: int) -> str:
    return "1 missing key" if count == 1 else f"{count:,} missing keys"


def _it(count: int) -> str:
    return "it needs" if count == 1 else "they need"
