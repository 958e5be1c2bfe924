"""The part of a state that a user wants, chosen by keys before anything is stored."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.formats.native.refs import PerRankValues, Slot
from holdfast.formats.native.values import key_of
from holdfast.states.contract import Path
from holdfast.states.expanding import Expanded

LEFT_OUT = object()

Wanted = Callable[[str], bool]


def select(expanded: Expanded, wanted: Wanted, rank: int) -> Expanded:
    """The leaves whose keys are wanted, in their containers. Containers of which nothing is left are left out too.

    A leaf is what has a key in the checkpoint: a list of plain values is one, a list with tensors is not.
    """
    selector = _Selector(wanted, expanded.slots, rank)
    tree = selector.select(expanded.tree, ())
    return Expanded({} if tree is LEFT_OUT else tree, selector.slots, expanded.from_first_rank)


class _Selector:
    def __init__(self, wanted: Wanted, slots: Mapping[str, tuple[Path, Any]], rank: int) -> None:
        self._wanted = wanted
        self._all_slots = slots
        self._rank = rank
        self.slots: dict[str, tuple[Path, Any]] = {}

    def select(self, value: Any, path: Path) -> Any:
        if isinstance(value, Slot):
            return self._slot(value, path)
        if isinstance(value, Mapping) and value:
            return self._mapping(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kept = [self.select(child, (*path, name)) for name, child in zip(value._fields, value, strict=True)]
            return LEFT_OUT if _nothing_in(kept) else type(value)(*_with_holes(kept))
        if type(value) in (list, tuple) and _hides_tensor(value):
            kept = [self.select(child, (*path, position)) for position, child in enumerate(value)]
            return LEFT_OUT if _nothing_in(kept) else type(value)(_with_holes(kept))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # It needs all its fields, so that one that is wanted is enough.
            names = (field.name for field in dataclasses.fields(value))
            is_wanted = any(self._wanted(key_of((*path, name))) for name in names)
            return value if is_wanted else LEFT_OUT
        return value if self._wanted(key_of(path)) else LEFT_OUT

    def _mapping(self, mapping: Any, path: Path) -> Any:
        kept = {key: self.select(child, (*path, key)) for key, child in mapping.items()}
        kept = {key: child for key, child in kept.items() if child is not LEFT_OUT}
        if not kept:
            return LEFT_OUT
        if type(mapping) is dict:
            return kept
        rebuilt = copy.copy(mapping)
        rebuilt.clear()
        rebuilt.update(kept)
        return rebuilt

    def _slot(self, slot: Slot, path: Path) -> Any:
        _, value = self._all_slots[slot.name]
        kept = self.select(value, (*path, self._rank))
        if kept is LEFT_OUT:
            return LEFT_OUT
        self.slots[slot.name] = (path, kept)
        return slot


def _nothing_in(kept: list[Any]) -> bool:
    return all(child is LEFT_OUT for child in kept)


def _with_holes(kept: list[Any]) -> list[Any]:
    """Positions must not move, so None stands where something was left out."""
    return [None if child is LEFT_OUT else child for child in kept]


def _hides_tensor(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray, PerRankValues, Slot)):
        return True
    if isinstance(value, Mapping):
        return any(map(_hides_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_hides_tensor, value))
