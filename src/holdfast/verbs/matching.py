"""Matches a live state with what is stored: which tensor goes where, which value is replaced, and what does not fit.

Nothing is changed here. The result is a tree of nodes, each of which knows how to finish once all tensors were read.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.formats.native.dtypes import dtype_named
from holdfast.formats.native.refs import (
    ANYTHING,
    PerRankValues,
    PickledValue,
    TensorRef,
    UndeclaredValue,
    UnknownValue,
)
from holdfast.formats.native.values import Path, key_of, numpy_dtype_from
from holdfast.planning.tensors import size_and_dtype
from holdfast.sources.stored_nodes import StoredNode
from holdfast.sources.trees import children_of, collect_refs, substituted
from holdfast.states.adapters import Context, adapter_for, per_rank_of
from holdfast.states.contract import Adapter
from holdfast.states.destinations import torch_dtype
from holdfast.states.per_rank import PerRank

_ABSENT = object()


@dataclass
class Fill:
    """A tensor or array of the state, and the stored tensor that goes into it."""

    key: str
    ref: TensorRef
    target: Any


@dataclass
class Findings:
    """What matching found out on one rank."""

    fills: list[Fill] = field(default_factory=list)
    read: dict[str, None] = field(default_factory=dict)
    """In order; the values mean nothing."""
    renamed: dict[str, str] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    transforms: list[tuple[str, Any, Callable[..., Any]]] = field(default_factory=list)
    """Key, target and function of what the user makes from the checkpoint."""
    adapters: list[Adapter] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """What the caller of a load allows."""

    wanted: Callable[[str], bool]
    may_cast: Callable[[str, str, str], bool]
    """Given a key, the stored dtype and that of the state."""
    fresh_dtype: Callable[[str], Any]
    """The dtype for a tensor that the state has no memory for; None for the stored one."""
    transform: Callable[[str], Callable[..., Any] | None]
    rank: int
    world_size: int


class Outcome(ABC):
    """A place of the state, as it will be when everything was read."""

    @abstractmethod
    def finish(self) -> Any:
        """Bring the place up to date, in place where that is possible, and return what belongs there."""


class Matcher:
    """Walks through a live state and a stored tree side by side."""

    def __init__(self, state: Any, rules: Rules) -> None:
        self.rules = rules
        self.found = Findings()
        self._context = Context.of(state)
        self._fresh: dict[str, Any] = {}
        self._inside_rank = False

    def match(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        """Match one place."""
        per_rank = per_rank_of(target)
        if per_rank is not None:
            return self._match_per_rank(target, per_rank, stored, path)
        adapter = adapter_for(target, path, self._context)
        if adapter is not None:
            return self._match_live(target, adapter, stored, path)
        if target is ANYTHING:
            return self._match_anything(stored, path)
        if isinstance(target, (torch.Tensor, np.ndarray)):
            return self._match_tensor(target, stored, path)
        parts = children_of(target)
        if parts and self._is_opened(target):
            return self._match_container(target, parts, stored, path)
        return self._match_value(target, stored, path)

    def _is_opened(self, target: Any) -> bool:
        return not isinstance(target, (list, tuple)) or _hides_target(target)

    def _match_container(
        self, target: Any, parts: Sequence[tuple[Any, Any]], stored: StoredNode | None, path: Path
    ) -> Outcome:
        if stored is not None and stored.is_leaf and children_of(stored.value) is None and stored.value is not None:
            key = key_of(path)
            if self.rules.wanted(key):
                stored.take()
                self.found.kinds[key] = (
                    f"is {_kind_of(stored.value)} in the checkpoint and a {type(target).__name__} in the state"
                )
            return _Kept(target)
        children = {}
        for name, child in parts:
            below = None if stored is None else stored.child(name)
            children[name] = self.match(child, below, (*path, name))
        return _Container(target, children)

    def _match_tensor(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        function = self.rules.transform(key)
        if not self.rules.wanted(key):
            self._leave(key, stored)
        elif function is not None:
            self.found.transforms.append((key, target, function))
        elif stored is None:
            self.found.missing.append(key)
        elif not isinstance(stored.value, TensorRef):
            stored.take()
            self.found.kinds[key] = f"is {_kind_of(stored.value)} in the checkpoint and a tensor in the state"
        else:
            stored.take()
            self._note_read(key, stored)
            self._plan_fill(key, stored.value, target)
        return _Kept(target)

    def _plan_fill(self, key: str, ref: TensorRef, target: Any) -> None:
        shape, dtype = _shape_and_dtype(target)
        if shape != ref.shape:
            self.found.shapes[key] = (ref.shape, shape)
            return
        if dtype != _dtype_name(ref):
            if not self.rules.may_cast(key, ref.dtype.name, dtype):
                self.found.dtypes[key] = (_dtype_name(ref), dtype)
                return
            self.found.cast[key] = (ref.dtype.name, dtype)
        self.found.fills.append(Fill(key, ref, target))

    def _match_value(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        function = self.rules.transform(key)
        if not self.rules.wanted(key):
            self._leave(key, stored)
            return _Kept(target)
        if function is not None:
            outcome = _Made()
            self.found.transforms.append((key, outcome, function))
            return outcome
        if stored is None:
            self.found.missing.append(key)
            return _Kept(target)
        if isinstance(stored.value, TensorRef) and target is not None:
            stored.take()
            self.found.kinds[key] = f"is a tensor in the checkpoint and a {type(target).__name__} in the state"
            return _Kept(target)
        return self._take(stored, path)

    def _match_anything(self, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        wanted = self.rules.wanted
        if stored is None:
            if wanted(key):
                self.found.missing.append(key)
            else:
                self.found.untouched.append(key)
            return _Kept(ANYTHING)
        if not any(wanted(_key_below(key, path, leaf, stored)) for leaf in stored.leaves()):
            self._leave(key, stored)
            return _Kept(ANYTHING)
        return self._take(stored, path)

    def _take(self, stored: StoredNode, path: Path) -> Outcome:
        """Take whatever is stored, with fresh memory for its tensors."""
        stored.take()
        key = key_of(path)
        for leaf in stored.leaves():
            below = _key_below(key, path, leaf, stored)
            self._note_read(below, leaf)
            self._refuse_inert(below, leaf.value)
        refs: dict[str, Any] = {}
        collect_refs(stored.value, refs)
        for ref in refs.values():
            if ref.key not in self._fresh:
                fresh = self._fresh[ref.key] = _fresh_memory(ref, self.rules.fresh_dtype(ref.key))
                if fresh is None:
                    self.found.kinds[ref.key] = f"has elements of {ref.dtype}, which torch does not have"
                    continue
                dtype = _shape_and_dtype(fresh)[1]
                if dtype != _dtype_name(ref):
                    self.found.cast[ref.key] = (ref.dtype.name, dtype)
                self.found.fills.append(Fill(ref.key, ref, fresh))
        return _Taken(stored.value, self._fresh)

    def _match_live(self, target: Any, adapter: Adapter, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        if not self._touches_anything(adapter, stored, path):
            self._leave(key, stored)
            return _Kept(target)
        template = adapter.template(None if stored is None else stored.value)
        self.found.adapters.append(adapter)
        before = len(self.found.read)
        transforms = len(self.found.transforms)
        content = self.match(template, stored, path)
        if len(self.found.read) == before and len(self.found.transforms) == transforms:
            return _Kept(target)  # nothing of it was stored; what is missing has been noted
        return _Live(target, adapter, content)

    def _touches_anything(self, adapter: Adapter, stored: StoredNode | None, path: Path) -> bool:
        """Whether any key of a live object is to be loaded."""
        key = key_of(path)
        if stored is not None:
            keys = [_key_below(key, path, leaf, stored) for leaf in stored.leaves()]
        else:
            keys = _leaf_keys(adapter.saved(), path)
        return any(map(self.rules.wanted, keys)) or not keys

    def _match_per_rank(self, target: Any, rule: PerRank, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        if not self.rules.wanted(key):
            self._leave(key, stored)
            return _Kept(target)
        if stored is None:
            self.found.missing.append(key)
            return _Kept(target)
        values = stored.value
        if not isinstance(values, PerRankValues):
            if rule.on_resize != "first":
                stored.take()
                self.found.kinds[key] = (
                    "is one value for all ranks in the checkpoint and per rank in the state; "
                    "holdfast.PerRank(value, on_resize='first') takes it for every rank"
                )
                return _Kept(target)
            return self._own(target, rule, self._match_own(rule.value, stored, path))
        stored.take()
        saved = len(values.ranks)
        sources = rule.sources(key, saved, self.rules.rank, self.rules.world_size)
        children = stored.children
        if not rule.needs_values(saved, self.rules.world_size):
            return self._own(target, rule, self._match_own(rule.value, children[sources[0]], path))
        self._inside_rank = True
        outcomes = [self._take(children[source], (*path, source)) for source in sources]
        self._inside_rank = False
        return _Chosen(target, rule, outcomes, saved, self.rules.rank, self.rules.world_size, self._adapter(rule, path))

    def _match_own(self, value: Any, stored: StoredNode, path: Path) -> Outcome:
        """Match this rank's own value with that of one rank."""
        adapter = adapter_for(value, path, self._context)
        self._inside_rank = True
        try:
            if adapter is not None:
                return self._match_live(value, adapter, stored, path)
            return self.match(value, stored, path)
        finally:
            self._inside_rank = False

    def _adapter(self, rule: PerRank, path: Path) -> Adapter | None:
        return adapter_for(rule.value, path, self._context)

    def _own(self, target: Any, rule: PerRank, outcome: Outcome) -> Outcome:
        return _Own(target, rule, outcome)

    def _leave(self, key: str, stored: StoredNode | None) -> None:
        if stored is not None:
            stored.take()
        self.found.untouched.append(key)

    def _note_read(self, key: str, leaf: StoredNode) -> None:
        self.found.read[key] = None
        if leaf.key not in ("", key) and not leaf.key.startswith("[") and not self._inside_rank:
            self.found.renamed[leaf.key] = key

    def _refuse_inert(self, key: str, value: Any) -> None:
        """Values that cannot be given back as what they were."""
        if isinstance(value, PickledValue):
            self.found.kinds[key] = "is stored as a pickle, which can run any code; allow_pickle=True loads it"
        elif isinstance(value, UndeclaredValue):
            self.found.kinds[key] = (
                f"is a {value.kind} of {value.type}, which this program has not declared; call "
                "holdfast.declare with that class"
            )
        elif isinstance(value, UnknownValue):
            self.found.kinds[key] = f"is of a type that this Holdfast does not know ({value.type})"
        else:
            for name, child in children_of(value) or []:
                self._refuse_inert(f"{key}.{name}", child)


@dataclass
class _Kept(Outcome):
    """Stays as it is: a tensor that is filled in place, or something that is not touched."""

    target: Any

    def finish(self) -> Any:
        return self.target


@dataclass
class _Taken(Outcome):
    """A stored value, with the fresh memory of its tensors put in."""

    value: Any
    fresh: Mapping[str, Any]

    def finish(self) -> Any:
        return substituted(self.value, lambda ref: self.fresh[ref.key])


class _Made(Outcome):
    """A value that a function of the user makes."""

    value: Any = None

    def finish(self) -> Any:
        return self.value


@dataclass
class _Container(Outcome):
    """A container of the state. It is updated in place, or made anew if it cannot be changed."""

    target: Any
    children: Mapping[Any, Outcome]

    def finish(self) -> Any:
        finished = {name: child.finish() for name, child in self.children.items()}
        target = self.target
        if isinstance(target, (dict, list)):
            for name, value in finished.items():
                if target[name] is not value:
                    target[name] = value
            return target
        before = dict(children_of(target) or [])
        if all(before[name] is value for name, value in finished.items()):
            return target
        if isinstance(target, tuple):
            return type(target)(*finished.values()) if hasattr(target, "_fields") else tuple(finished.values())
        if dataclasses.is_dataclass(target):
            for name, value in finished.items():
                object.__setattr__(target, name, value)
            return target
        for name, value in finished.items():
            target[name] = value
        return target


@dataclass
class _Live(Outcome):
    """A live object, which takes over its filled template."""

    target: Any
    adapter: Adapter
    content: Outcome

    def finish(self) -> Any:
        loaded = self.content.finish()
        if _has_gaps(loaded):
            loaded = _filled_up(loaded, self.adapter.saved())
        self.adapter.apply(loaded)
        return self.target


@dataclass
class _Own(Outcome):
    """What this rank has its own of."""

    target: Any
    rule: PerRank
    outcome: Outcome

    def finish(self) -> Any:
        value = self.outcome.finish()
        if self.target is self.rule:
            self.rule.value = value
        return self.target


@dataclass
class _Chosen(Outcome):
    """What this rank gets from the values of all ranks that saved."""

    target: Any
    rule: PerRank
    values: Sequence[Outcome]
    saved: int
    rank: int
    world_size: int
    adapter: Adapter | None

    def finish(self) -> Any:
        chosen = self.rule.chosen([value.finish() for value in self.values], self.saved, self.rank, self.world_size)
        if self.adapter is not None:
            self.adapter.apply(chosen)
        else:
            self.rule.value = chosen
        return self.target


def _fresh_memory(ref: TensorRef, dtype: Any) -> Any:
    if ref.numpy is not None:
        return np.empty(ref.shape, numpy_dtype_from(ref.numpy))
    found = torch_dtype(ref.dtype) if dtype is None or not _is_floating(ref) else dtype
    return None if found is None else torch.empty(ref.shape, dtype=found)


def _is_floating(ref: TensorRef) -> bool:
    return "float" in ref.dtype.name or "complex" in ref.dtype.name


def _shape_and_dtype(target: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(target, np.ndarray):
        return target.shape, _numpy_name(target.dtype)
    size, dtype = size_and_dtype(target)
    return tuple(size), str(dtype).removeprefix("torch.")


def _numpy_name(dtype: np.dtype[Any]) -> str:
    try:
        known = dtype_named(dtype.name)
    except ValueError:
        return str(dtype)
    return known.name if known.numpy == dtype and dtype == dtype.newbyteorder("<") else str(dtype)


def _dtype_name(ref: TensorRef) -> str:
    return ref.dtype.name if ref.numpy is None else _numpy_name(numpy_dtype_from(ref.numpy))


def _kind_of(stored: Any) -> str:
    if isinstance(stored, TensorRef):
        return "a tensor"
    if isinstance(stored, PerRankValues):
        return "stored per rank (wrap it in holdfast.PerRank),"
    return f"a {type(stored).__name__}"


def _key_below(key: str, path: Path, leaf: StoredNode, stored: StoredNode) -> str:
    """What the state would call a leaf that lies below a stored node, or that the node is a part of."""
    deeper = len(stored.path) - len(leaf.path)
    if deeper > 0:
        return key_of(path[:-deeper])
    inner = leaf.path[len(stored.path) :] if leaf.path[: len(stored.path)] == stored.path else leaf.path
    return key_of((*path, *inner)) if inner else key


def _leaf_keys(value: Any, path: Path) -> list[str]:
    parts = children_of(value)
    if not parts:
        return [key_of(path)]
    return [key for name, child in parts for key in _leaf_keys(child, (*path, name))]


def _hides_target(value: Any) -> bool:
    """Whether something in a list or tuple is filled in place or speaks for itself."""
    if value is ANYTHING or isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if per_rank_of(value) is not None or adapter_for(value) is not None:
        return True
    return any(_hides_target(child) for _, child in children_of(value) or [])


def _has_gaps(loaded: Any) -> bool:
    return loaded is ANYTHING or any(_has_gaps(child) for _, child in children_of(loaded) or [])


def _filled_up(loaded: Any, current: Any) -> Any:
    """What was loaded, with the present values of a live object where nothing was to be loaded."""
    if loaded is ANYTHING:
        return current
    parts = children_of(loaded)
    if not parts or not isinstance(loaded, (dict, list, tuple)):
        return loaded
    known = dict(children_of(current) or [])
    filled = {name: _filled_up(child, known.get(name, _ABSENT)) for name, child in parts}
    if isinstance(loaded, dict):
        return {name: child for name, child in filled.items() if child is not _ABSENT}
    kept: list[Any] = [None if child is _ABSENT else child for child in filled.values()]
    kind: Any = type(loaded)
    return kind(*kept) if hasattr(loaded, "_fields") else kind(kept)
