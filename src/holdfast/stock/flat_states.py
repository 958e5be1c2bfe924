"""A stored state under the names that torch's planners give to what is in a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.formats.native.decoding import PLAIN
from holdfast.formats.native.refs import PerRankValues, TensorRef
from holdfast.formats.native.torch_elements import torch_dtype
from holdfast.formats.native.trees import children_of, mapped
from holdfast.formats.native.values import Path


@dataclass(frozen=True)
class FlatState:
    """The leaves of a state by name, with their paths, and what has no name that one could load it by."""

    leaves: dict[str, Any] = field(default_factory=dict)
    """Values with references in place of tensors, or references."""
    paths: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Names, with the reason."""


def flat_state(tree: Mapping[Any, Any], rank: int, world_size: int, *, top_level_only: bool = False) -> FlatState:
    """Flatten a state as torch's planners do.

    Dicts are opened, and lists that hold a dict or a tensor; all else is a value. Of what every rank had its own of,
    this rank's is taken if there are as many ranks as there were.

    >>> flat_state({"model": {"w": 1}, "betas": (0.9, 0.99), "groups": [{"lr": 0.1}]}, 0, 1).leaves
    {'model.w': 1, 'betas': (0.9, 0.99), 'groups.0.lr': 0.1}
    """
    found = FlatState()
    own = _own(tree, rank, world_size)
    for path, value in _top_level(own) if top_level_only else _leaves(own, ()):
        name = ".".join(map(str, path))
        reason = _why_not(value)
        if reason is None and (name in found.leaves or name in found.left_out):
            reason = "several entries of the state have this name"
            found.leaves.pop(name, None)
            found.paths.pop(name, None)
        if reason is None:
            found.leaves[name], found.paths[name] = value, path
        else:
            found.left_out[name] = reason
    return found


def is_tensor(value: Any) -> bool:
    """Whether a leaf is a tensor of torch's; numpy arrays are values there."""
    return isinstance(value, TensorRef) and value.numpy is None


def is_plain(value: Any) -> bool:
    """Whether it is a list or tuple of numbers and texts, of which there may be millions."""
    return type(value) in (list, tuple) and PLAIN.issuperset(map(type, value))


@dataclass(frozen=True)
class _OfOtherRanks:
    """In place of what no rank of this program had its own of."""

    saved: int


def _own(value: Any, rank: int, world_size: int) -> Any:
    if isinstance(value, PerRankValues):
        if len(value.ranks) != world_size:
            return _OfOtherRanks(len(value.ranks))
        return _own(value.ranks[rank], rank, world_size)
    if is_plain(value):
        return value
    return mapped(value, lambda child: _own(child, rank, world_size))


def _top_level(state: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        yield (str(key),), value


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, (*path, str(key)))
    elif type(value) is list and _is_opened(value):
        for position, child in enumerate(value):
            yield from _leaves(child, (*path, position))
    else:
        yield path, value


def _is_opened(value: Any) -> bool:
    if type(value) is list:
        return any(map(_is_opened, value))
    return isinstance(value, Mapping) or is_tensor(value)


def _why_not(value: Any) -> str | None:
    if isinstance(value, _OfOtherRanks):
        return f"each of {value.saved} ranks stored its own, and now there is another number of ranks"
    if isinstance(value, TensorRef) and value.numpy is None and torch_dtype(value.dtype) is None:
        return f"torch has no tensors of {value.dtype}"
    for _, child in () if is_plain(value) else children_of(value) or ():
        reason = _why_not(child)
        if reason is not None:
            return reason
    return None
