"""What does not fit between a checkpoint and the state to load into: over all keys and ranks, reported together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._base.texts import listed, quoted_key
from holdfast.errors import HoldfastError, StateMismatchError

MOST_SHOWN = 30


@dataclass
class Mismatches:
    """What one rank found, or all together. Keys are those of the state, but for ``unexpected``."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of what is stored, and of the state. So are ``dtypes``."""
    dtypes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """What is wrong with a key, in words that go on after its name."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Why a tensor would not be filled to the last element."""
    errors: dict[str, HoldfastError] = field(default_factory=dict)
    """Of live objects that cannot take what is stored."""
    stored_keys: Sequence[str] = ()
    """All keys of the checkpoint, if something is missing: another one may be meant."""

    def add(self, others: Mismatches) -> None:
        """Take in those of another rank. What was found before counts."""
        self.missing = list(dict.fromkeys([*self.missing, *others.missing]))
        self.unexpected = list(dict.fromkeys([*self.unexpected, *others.unexpected]))
        for name in ("shapes", "dtypes", "kinds", "uncovered", "errors"):
            found: dict[str, Any] = getattr(self, name)
            for key, what in getattr(others, name).items():
                found.setdefault(key, what)
        self.stored_keys = self.stored_keys or others.stored_keys

    def raise_if_any(self, location: str, advice: Mapping[str, str] | None = None) -> None:
        """Raise if anything does not fit. ``advice`` says by the name of a field what to do about what is in it."""
        lines = self.lines()
        if not lines:
            return
        if len(lines) == len(self.errors) and len(set(map(type, self.errors.values()))) == 1:
            raise _joined(list(self.errors.values()))
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        what_to_do = [text for name, text in (advice or {}).items() if getattr(self, name)]
        raise StateMismatchError(
            "\n".join(
                [
                    f"{location} does not fit the state to load into ({count}):",
                    *listed(lines, MOST_SHOWN),
                    " ".join(["Nothing was changed.", *what_to_do]),
                ]
            ),
            missing=self.missing,
            unexpected=self.unexpected,
            shapes=self.shapes,
            dtypes=self.dtypes,
            kinds={**self.kinds, **{key: error.message for key, error in self.errors.items()}},
            uncovered=self.uncovered,
        )

    def lines(self) -> list[str]:
        """One line for each problem."""
        near = near_misses(self.missing, self.stored_keys)
        return [
            *(self.missing_line(key, near.get(key, "")) for key in self.missing),
            *(f"{quoted_key(key)} is in the checkpoint and has no place in the state" for key in self.unexpected),
            *(self.shape_line(key, *shapes) for key, shapes in self.shapes.items()),
            *(self.dtype_line(key, *dtypes) for key, dtypes in self.dtypes.items()),
            *(f"{quoted_key(key)} {text}" for key, text in self.kinds.items()),
            *(f"{quoted_key(key)}: {text}" for key, text in self.uncovered.items()),
            *(f"{quoted_key(key)}: {error.message}" for key, error in self.errors.items()),
        ]

    def missing_line(self, key: str, near: str) -> str:
        """A key that is not stored, with what may be meant."""
        return f"{quoted_key(key)} is missing in the checkpoint{near}"

    def shape_line(self, key: str, saved: Any, current: Any) -> str:
        """A tensor that is stored with another shape."""
        return f"{quoted_key(key)} has shape {list(saved)} in the checkpoint and {list(current)} in the state"

    def dtype_line(self, key: str, saved: Any, current: Any) -> str:
        """A tensor that is stored with another element type."""
        return f"{quoted_key(key)} is {saved} in the checkpoint and {current} in the state"


def _joined(errors: Sequence[HoldfastError]) -> HoldfastError:
    """Errors of one kind as one: the first one, with what the others say."""
    messages = list(dict.fromkeys(error.message.rstrip(".") for error in errors))
    made: Any = type(errors[0])(". ".join([*messages, "Nothing was changed."]), **errors[0].fields)
    return made  # type: ignore[no-any-return]


# Keys that may be meant by missing ones.


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def near_misses(missing: Sequence[str], stored: Sequence[str]) -> dict[str, str]:
    """Stored keys that may be meant; looked up for the first few missing ones only, since searching is slow.

    >>> near_misses(["model.wieght"], ["model.bias", "model.weight"])
    {'model.wieght': " (did you mean 'model.weight'?)"}
    """
    if not missing:
        return {}
    found: dict[str, str] = {}
    by_tail: dict[str, str] = {}
    for key in stored:
        by_tail.setdefault(_tail(key), key)
    for key in missing[:MOST_SHOWN]:
        near = by_tail.get(_tail(key)) or next(
            iter(difflib.get_close_matches(key, stored[:5000], n=1, cutoff=0.7)), None
        )
        if near not in (None, key):  # a key that is there and was renamed does not help
            found[key] = f" (did you mean '{near}'?)"
    return found


def _tail(key: str) -> str:
    """The key without what wrappers put into it."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)
