"""What matching a state with a checkpoint finds out on one rank: what is to be done, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast._load.filling import DenseFills, Fill
from holdfast._state.contract import Adapter
from holdfast.errors import HoldfastError


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
class LoadFindings:
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
