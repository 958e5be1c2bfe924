"""What matching a state with a checkpoint finds out, and what does not fit, over all keys and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._dcp.load_problems import near_misses
from holdfast._load.filling import DenseFills, Fill
from holdfast._state.contract import Adapter
from holdfast.errors import HoldfastError, StateMismatchError

# What matching a state with a checkpoint finds out on one rank.


@dataclass(frozen=True)
class Transform:
    """A place of the state that gets what a function of the user makes of the checkpoint."""

    key: str
    target: Any
    """The tensor to fill, or None for a value."""
    function: Callable[..., Any]
    take: Callable[[Any], None]
    """Where a value goes that was made."""


@dataclass
class Findings:
    """What is to be done, and what does not fit. All keys are those of the state."""

    fills: list[Fill] = field(default_factory=list)
    dense: DenseFills = field(default_factory=DenseFills)
    """Those that take the stored bytes as they are."""
    transforms: list[Transform] = field(default_factory=list)
    adapters: list[tuple[str, Adapter]] = field(default_factory=list)
    """Of the live objects that are loaded, with their keys."""
    read: dict[str, None] = field(default_factory=dict)
    """In order; the values mean nothing."""
    renamed: dict[str, str] = field(default_factory=dict)
    """From stored keys to other keys of the state."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    missing: dict[str, Any] = field(default_factory=dict)
    """With the tensor that has the key in the state, if it is one."""
    settled: list[str] = field(default_factory=list)
    """Keys that are not stored, and whose tensor is loaded under another name that it has."""
    unexpected: list[str] = field(default_factory=list)
    """In what this rank has stored of its own."""
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    misfits: dict[str, str] = field(default_factory=dict)
    """What is wrong with a key, in words that go on after its name."""
    errors: dict[str, HoldfastError] = field(default_factory=dict)
    """Of live objects that cannot take what is stored."""

    def settle(self, key: str) -> None:
        """A missing key is loaded with another name of its tensor."""
        del self.missing[key]
        self.read[key] = None
        self.settled.append(key)


# What does not fit between a checkpoint and a state, over all keys and ranks, told at once.


_MOST_SHOWN = 30


@dataclass
class Problems:
    """What ranks found wrong: one of them, or all together. Keys are those of the state, but for ``unexpected``."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)
    errors: dict[str, HoldfastError] = field(default_factory=dict)
    stored_keys: list[str] = field(default_factory=list)
    """All keys of the checkpoint, if something is missing."""

    def add(self, others: Problems) -> None:
        """Take in those of another rank. What was found before counts."""
        self.missing = list(dict.fromkeys([*self.missing, *others.missing]))
        self.unexpected = list(dict.fromkeys([*self.unexpected, *others.unexpected]))
        for name in ("shapes", "dtypes", "kinds", "uncovered", "errors"):
            setattr(self, name, getattr(others, name) | getattr(self, name))
        self.stored_keys = self.stored_keys or others.stored_keys

    def raise_if_any(self, location: str) -> None:
        """Raise if there are problems."""
        lines = self._lines()
        if not lines:
            return
        if len(lines) == len(self.errors) and len(set(map(type, self.errors.values()))) == 1:
            raise _joined(list(self.errors.values()))
        shown = [f"  {line}" for line in lines[:_MOST_SHOWN]]
        if len(lines) > _MOST_SHOWN:
            shown.append(f"  … and {len(lines) - _MOST_SHOWN} more")
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        raise StateMismatchError(
            "\n".join(
                [
                    f"{location} does not fit the state to load into ({count}):",
                    *shown,
                    " ".join(["Nothing was changed.", *self._advice()]),
                ]
            ),
            missing=self.missing,
            unexpected=self.unexpected,
            shapes=self.shapes,
            dtypes=self.dtypes,
            kinds={**self.kinds, **{key: error.message for key, error in self.errors.items()}},
            uncovered=self.uncovered,
        )

    def _lines(self) -> list[str]:
        near = near_misses(self.missing, self.stored_keys)
        return [
            *(f"{_named(key)} is missing in the checkpoint{near.get(key, '')}" for key in self.missing),
            *(f"{_named(key)} is in the checkpoint and has no place in the state" for key in self.unexpected),
            *(
                f"{_named(key)} has shape {list(saved)} in the checkpoint and {list(current)} in the state"
                for key, (saved, current) in self.shapes.items()
            ),
            *(
                f"{_named(key)} is {saved} in the checkpoint and {current} in the state"
                for key, (saved, current) in self.dtypes.items()
            ),
            *(f"{_named(key)} {text}" for key, text in self.kinds.items()),
            *(f"{_named(key)}: {text}" for key, text in self.uncovered.items()),
            *(f"{_named(key)}: {error.message}" for key, error in self.errors.items()),
        ]

    def _advice(self) -> list[str]:
        advice = []
        if self.missing:
            advice.append("allow_missing=[...] leaves such keys as they are; rename={stored: wanted} finds them.")
        if self.unexpected:
            advice.append("allow_unexpected=[...] passes such keys over.")
        if self.dtypes:
            advice.append("cast=True, or cast=[patterns], allows conversions.")
        return advice


def _named(key: str) -> str:
    return f"'{key}'" if key else "the state"


def _joined(errors: Sequence[HoldfastError]) -> HoldfastError:
    """Errors of one kind as one: the first one, with what the others say."""
    messages = list(dict.fromkeys(error.message.rstrip(".") for error in errors))
    made: Any = type(errors[0])(". ".join([*messages, "Nothing was changed."]), **errors[0].fields)
    return made  # type: ignore[no-any-return]
