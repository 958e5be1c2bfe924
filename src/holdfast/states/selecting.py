"""The part of a state that a user wants, chosen by keys before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import UnsupportedValueError
from holdfast.formats.native.declared import declared_class, kind_to_declare
from holdfast.formats.native.pruning import NOTHING, part_of, pruned
from holdfast.formats.native.refs import Slot, UndeclaredValue
from holdfast.formats.native.trees import children_of
from holdfast.formats.native.values import Path, key_of
from holdfast.states.expanding import Expanded


def select(expanded: Expanded, wanted: Callable[[str], bool], rank: int) -> Expanded:
    """The leaves whose keys are wanted, in their containers. Containers of which nothing is left are left out too."""
    slots = {}
    for name, (path, value) in expanded.slots.items():
        kept = _selected(value, (*path, rank), lambda below: wanted(key_of(below)))
        if kept is not NOTHING:
            slots[name] = (path, kept)
    names = {path: name for name, (path, _) in expanded.slots.items()}
    tree = _selected(expanded.tree, (), lambda path: names[path] in slots if path in names else wanted(key_of(path)))
    kinds = {path: kind for path, kind in expanded.kinds.items() if path in names or _is_in(tree, path)}
    return Expanded({} if tree is NOTHING else tree, slots, expanded.from_first_rank, kinds)


def _is_in(tree: Any, path: Path) -> bool:
    """Whether something is left at a place. Positions in lists that became shorter do not tell."""
    for name in path:
        children = dict(children_of(tree) or ())
        if name not in children:
            return False
        tree = children[name]
    return True


def _selected(value: Any, path: Path, wanted: Callable[[Path], bool]) -> Any:
    return pruned(value, path, wanted, tensors=(torch.Tensor, np.ndarray, Slot), part_of=_part_of_declared)


def _part_of_declared(value: Any, fields: Mapping[str, Any], path: Path) -> UndeclaredValue:
    """What is not declared cannot be stored as a whole either, unless it is pickled, and then with all its fields."""
    if declared_class(type(value)) is None and not isinstance(value, UndeclaredValue):
        key, kind = key_of(path), kind_to_declare(type(value)) or type(value).__name__
        raise UnsupportedValueError(
            f"only some fields of '{key}' are to be saved, which takes a declared {kind}: put @holdfast.declare above "
            f"{type(value).__qualname__}",
            key=key,
            keys=[key],
        )
    return part_of(value, fields, path)
