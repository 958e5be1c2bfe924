"""Walks through a live state and a stored tree side by side: which tensor goes where, and what does not fit.

Nothing is changed here. The result is a tree of outcomes, each of which knows how to finish once all tensors were read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch

from holdfast._formats.native.keys import readable
from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._formats.native.trees import NOTHING, children_of, hides_tensor, is_named, pruned, refs_in
from holdfast._formats.native.values import Path, key_of
from holdfast._layout.materialize import is_meta, with_memory
from holdfast._layout.tensor_kinds import KIND, TO_LOAD, is_partitioned
from holdfast._load.applying import (
    Container,
    FilledUp,
    Kept,
    LiveObject,
    Outcome,
    Put,
    Taken,
    Template,
    can_be_made_anew,
    is_changeable,
)
from holdfast._load.filling import PLAIN, Fill
from holdfast._load.findings import LoadFindings, Transform
from holdfast._load.matching_per_rank import match_per_rank, match_unmarked, of_this_rank
from holdfast._load.options import LoadOptions
from holdfast._load.stored_nodes import StoredNode
from holdfast._load.targets import (
    can_be_converted,
    fresh_memory,
    in_words,
    is_target,
    shape_and_dtype,
    stored_dtype_name,
    takes_anything,
    takes_numbers,
    why_not_fillable,
    why_not_real,
    why_not_restorable,
)
from holdfast._state.contract import Adapter
from holdfast._state.expanding import Context, adapter_for, is_live, per_rank_of
from holdfast.errors import HoldfastError

_IN_PLACE = frozenset({dict, OrderedDict, list})
"""Containers that keep what they hold unless something is put into its place."""


class Matcher:
    """Matches the places of one state."""

    def __init__(
        self, state: Any, options: LoadOptions, *, rank: int, world_size: int, kinds: Mapping[str, str]
    ) -> None:
        self.options = options
        self.kinds = kinds
        """What was noted about live objects, by their stored keys."""
        self.rank = rank
        self.world_size = world_size
        self.found = LoadFindings()
        self.context = Context.of(state)
        self._fresh: dict[str, Any] = {}
        self._claims: dict[int, str] = {}
        self._live = 0
        """In how many live objects, one in the other, the walk is."""
        self._own = 0
        """In how many per-rank values it is nested."""

    def match_state(self, state: Any, stored: StoredNode) -> Outcome:
        """Match the whole state, which has to stay the same object."""
        outcome = self.match(state, stored, ())
        if outcome.replaces:
            self.found.misfits.setdefault(
                "",
                f"is a {type(state).__name__}, which cannot be changed in place; put it into a dict or a list and load "
                "that",
            )
        return outcome

    def match(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        """Match one place."""
        per_rank = per_rank_of(target)
        if per_rank is not None:
            return match_per_rank(self, target, per_rank, stored, path)
        if stored is not None and stored.is_per_rank:
            return match_unmarked(self, target, stored, path)
        adapter = adapter_for(target, path, self.context)
        if adapter is not None:
            return self.match_live(target, adapter, stored, path)
        if is_target(target):
            return self._match_tensor(target, stored, path)
        parts = children_of(target)
        has_keys = not isinstance(target, (list, tuple)) or _hides_target(target)
        has_names = is_named(target) and stored is not None and not stored.is_leaf
        if parts and (has_keys or has_names):
            return self._match_container(target, parts, stored, path)
        return self._match_value(target, stored, path)

    def _match_container(
        self, target: Any, parts: Sequence[tuple[Any, Any]], stored: StoredNode | None, path: Path
    ) -> Outcome:
        if stored is not None and stored.is_leaf and children_of(stored.value) is None and stored.value is not None:
            key = key_of(path)
            if self.options.wanted(key):
                reason = why_not_restorable(stored.value)
                kind = f"is {in_words(stored.value)} in the checkpoint and a {type(target).__name__} in the state"
                return self.refuse(key, stored, reason or kind, target)
            return self.leave(key, stored, target)
        if stored is not None and _is_empty(stored):
            stored.take()  # all that it lacks is reported
        # Most of a state are tensors that fit. They stay what they are, so once they are read nothing is left to do.
        dense = self._match_dense(target, parts, stored, path)
        if len(dense) == len(parts):
            self.found.read.update(dict.fromkeys(dense.values()))
            parts = ()
        children = {}
        for name, child in parts:
            if name in dense:
                self.found.read[dense[name]] = None
            else:
                below = None if stored is None else stored.child(name)
                children[name] = self.match(child, below, (*path, name))
        if self._live:
            return Template(target, children)
        if not is_changeable(target) and not can_be_made_anew(target) and any(o.replaces for o in children.values()):
            self.found.misfits[key_of(path)] = (
                f"is a {type(target).__name__}, whose elements cannot be replaced; use a dict"
            )
        return Container(target, children)

    def _dense_prefix(self, target: Any, stored: StoredNode | None, path: Path) -> str | None:
        """What comes before the names of a container's elements in their keys; None if they have to be looked at."""
        everything = self.options.wanted.is_everything and not self.options.transform
        if not everything or stored is None or stored.is_per_rank or type(target) not in _IN_PLACE:
            return None
        prefix = key_of(path)
        return None if prefix.startswith("[") else f"{prefix}." if path else ""

    def _match_dense(
        self, target: Any, parts: Sequence[tuple[Any, Any]], stored: StoredNode | None, path: Path
    ) -> dict[Any, str]:
        """Match all tensors in a container that take the stored bytes as they are. Returns their names and keys."""
        prefix = self._dense_prefix(target, stored, path)
        if prefix is None or stored is None:
            return {}
        targets = {
            name: child
            for name, child in parts
            if type(child) in PLAIN and type(name) is str and name.isascii() and (prefix or not name.startswith("["))
        }
        found = stored.tensors_called(list(targets))
        if None in found:
            targets = dict(compress(targets.items(), [pair is not None for pair in found]))
        pairs = [pair for pair in found if pair is not None]
        keys = [prefix + name for name in targets]
        fits = self.found.dense.take_fitting(keys, [ref for _, ref in pairs], list(targets.values()))
        self._note_taken([node for node, _ in compress(pairs, fits)], list(compress(keys, fits)))
        return dict(compress(zip(targets, keys, strict=True), fits))

    def _note_taken(self, nodes: Sequence[StoredNode], keys: Sequence[str]) -> None:
        """Note that tensors of these keys take what is stored at these nodes."""
        for node in nodes:
            node.taken = True
        identities = list(map(id, nodes))
        is_first = len(set(identities)) == len(identities) and self._claims.keys().isdisjoint(identities)
        if is_first and [node.key for node in nodes] == keys:
            self._claims.update(zip(identities, keys, strict=True))
            return
        for node, key in zip(nodes, keys, strict=True):
            self._note_claim(key, node)

    def _match_tensor(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        function = self.options.transform(key)
        if not self.options.wanted(key):
            return self.leave(key, stored, target)
        if function is not None:
            outcome, memory = self._with_memory(key, target)
            self._plan_transform(Transform(key, memory, function, _ignore), stored)
            return outcome
        if stored is None:
            self.found.missing[key] = target
            return self._unloaded(target)
        if not isinstance(stored.value, TensorRef):
            kind = f"is {in_words(stored.value)} in the checkpoint and a tensor in the state"
            return self.refuse(key, stored, why_not_restorable(stored.value) or kind, target)
        stored.take()
        self._note_read(key, stored)
        outcome, memory = self._with_memory(key, target)
        self._plan_fill(key, stored.value, memory)
        return outcome

    def _with_memory(self, key: str, target: Any) -> tuple[Outcome, Any]:
        """A tensor to fill, and what becomes of its place: one on the meta device is replaced."""
        if self._live or not (isinstance(target, torch.Tensor) and is_meta(target)):
            return Kept(target), target
        memory = with_memory(key, target)
        return Put(memory), memory

    def _plan_transform(self, transform: Transform, stored: StoredNode | None) -> None:
        self.found.transforms.append(transform)
        if stored is not None:
            stored.take()  # it has a place in the state, whatever the function makes for that

    def _plan_fill(self, key: str, ref: TensorRef, target: Any) -> None:
        if is_partitioned(target):
            self.found.misfits[key] = f"is {KIND}; {TO_LOAD}"
            return
        shape, dtype = shape_and_dtype(target)
        if shape != ref.shape:
            self.found.shapes[key] = (ref.shape, shape)
            return
        stored_dtype = stored_dtype_name(ref)
        reason = why_not_fillable(key, target) or why_not_real(key, stored_dtype, dtype)
        if reason is not None:
            self.found.misfits[key] = reason
            return
        if dtype != stored_dtype:
            if not (self.options.casts.allow(key, dtype) and can_be_converted(ref) and takes_numbers(target)):
                self.found.dtypes[key] = (stored_dtype, dtype)
                return
            self.found.cast[key] = (stored_dtype, dtype)
        self._fill(key, ref, target)

    def _fill(self, key: str, ref: TensorRef, target: Any) -> None:
        if type(target) not in PLAIN or not self.found.dense.take(key, ref, target):
            self.found.fills.append(Fill(key, ref, target))

    def _match_value(self, target: Any, stored: StoredNode | None, path: Path) -> Outcome:
        key = key_of(path)
        function = self.options.transform(key)
        is_open = takes_anything(target)
        if not self.options.wanted(key) and not (is_open and stored is not None and not stored.is_leaf):
            return self.leave(key, stored, target)
        if function is not None:
            outcome = Put()
            self._plan_transform(Transform(key, None, function, outcome.put), stored)
            return outcome
        if stored is None and self._live and children_of(target) == []:
            return Kept(target)  # nothing is there, and some formats keep nothing of it
        if stored is None:
            self.found.missing[key] = None
            return self._unloaded(target)
        if is_open:
            return self._match_anything(target, stored, path)
        if not isinstance(target, (list, tuple)) and hides_tensor(stored.value):
            what = "a tensor" if isinstance(stored.value, TensorRef) else "tensors"
            reason = f"is {what} in the checkpoint and a {type(target).__name__} in the state"
            return self.refuse(key, stored, reason, target)
        return self._take_if_wanted(target, stored, path)

    def _match_anything(self, target: Any, stored: StoredNode, path: Path) -> Outcome:
        """Match a place that takes whatever is stored, as far as it is wanted."""
        taken = self._take_if_wanted(target, stored, path)
        kind = type(target)
        if not isinstance(taken, Taken) or self._live or kind not in (dict, list):
            return taken
        # The whole state stays what it is; a place in it becomes what is stored.
        is_alike = type(taken.value) is kind if path else isinstance(taken.value, kind)
        return FilledUp(target, taken) if is_alike else taken

    def _take_if_wanted(self, target: Any, stored: StoredNode, path: Path) -> Outcome:
        """Take what is stored. The place may be wanted, and yet nothing of what it would get."""
        if not any(self.options.wanted(key) for key, _ in self.keys_below(stored, path)):
            return self.leave(key_of(path), stored, target)
        return self.take(stored, path)

    def take(self, stored: StoredNode, path: Path) -> Taken:
        """Take what is stored, with fresh memory for its tensors."""
        stored.take()
        value = stored.value
        leaves = list(self.keys_below(stored, path))
        unwanted = [key for key, _ in leaves if not self.options.wanted(key)]
        if unwanted:
            self.found.untouched.extend(unwanted)
            value = pruned(value, path, lambda below: self.options.wanted(key_of(below)))
            value = None if value is NOTHING else value
            leaves = [(key, leaf) for key, leaf in leaves if self.options.wanted(key)]
        for key, leaf in leaves:
            self._note_read(key, leaf)
            for ref in refs_in(leaf.value):
                self._give_memory(key, ref)
        own = of_this_rank(self, value, path)
        self._refuse_inert(key_of(path), own)
        return Taken(own, self._fresh)

    def _give_memory(self, key: str, ref: TensorRef) -> None:
        if ref.key in self._fresh:  # tied: one tensor with several names
            return
        fresh = self._fresh[ref.key] = fresh_memory(ref, self.options.casts.dtype_for(key))
        if type(fresh) in PLAIN and self.found.dense.take(key, ref, fresh):
            return
        if fresh is None:
            self.found.misfits[key] = f"has elements of {ref.dtype}, which torch does not have"
            return
        dtype = shape_and_dtype(fresh)[1]
        if dtype != stored_dtype_name(ref):
            self.found.cast[key] = (ref.dtype.name, dtype)
        self._fill(key, ref, fresh)

    def match_live(self, target: Any, adapter: Adapter, stored: StoredNode | None, path: Path) -> Outcome:
        """Match the template of a live object."""
        key = key_of(path)
        if not self._touches_anything(adapter, stored, path):
            self.leave(key, stored, target)
            return Kept(target)
        noted = None if stored is None else self.kinds.get(readable(stored.path))
        adapter.expect(noted, self.options.optimizer_mismatch)
        try:
            template = adapter.template(None if stored is None else stored.value)
        except HoldfastError as error:
            self.found.errors[key] = error
            if stored is not None:
                stored.take()
            return Kept(target)
        if children_of(template) == [] and not _is_empty(stored):
            return Kept(target)  # it has no state to load, so what is stored here has no place
        self.found.adapters.append((key, adapter))
        before = len(self.found.read) + len(self.found.transforms)
        with self._in_live_object():
            content = self.match(template, stored, path)
        if len(self.found.read) + len(self.found.transforms) == before:
            return Kept(target)  # nothing of it is loaded; what is missing has been noted
        return LiveObject(target, adapter, content, key)

    @contextmanager
    def _in_live_object(self) -> Iterator[None]:
        self._live += 1
        try:
            yield
        finally:
            self._live -= 1

    @contextmanager
    def in_own_value(self) -> Iterator[None]:
        """Within this, keys are those of per-rank state."""
        self._own += 1
        try:
            yield
        finally:
            self._own -= 1

    def _touches_anything(self, adapter: Adapter, stored: StoredNode | None, path: Path) -> bool:
        """Whether any key of a live object is to be loaded."""
        if self.options.wanted.is_everything:
            return True
        if stored is not None:
            keys = [key for key, _ in self.keys_below(stored, path)]
        else:
            keys = _leaf_keys(adapter.saved(), path)
        return any(map(self.options.wanted, keys)) or not keys

    def keys_below(self, stored: StoredNode, path: Path) -> Iterator[tuple[str, StoredNode]]:
        """The leaves at a stored node that concern this rank, with the keys that the state has for them.

        If the node is a part of a leaf, it is taken for one itself.
        """
        if stored.leaf is not None:
            yield key_of(path), stored
        elif not stored.is_per_rank:
            for name, child in stored.children.items():
                yield from self.keys_below(child, (*path, name))
        elif len(stored.children) == self.world_size:
            yield from self.keys_below(stored.children[self.rank], path)

    def leave(self, key: str, stored: StoredNode | None, target: Any) -> Outcome:
        """Note that a place is not to be loaded."""
        if stored is not None:
            stored.take()
        self.found.untouched.append(key)
        return self._unloaded(target)

    def refuse(self, key: str, stored: StoredNode, reason: str, target: Any) -> Outcome:
        """Note why what is stored does not fit. The reason goes on after the key."""
        stored.take()
        self.found.misfits[key] = reason
        return self._unloaded(target)

    def _unloaded(self, target: Any) -> Outcome:
        """A place to which nothing is loaded. A live object must not take a template's memory for a loaded tensor."""
        return Put(ANYTHING) if self._live else Kept(target)

    def _note_read(self, key: str, leaf: StoredNode) -> None:
        self.found.read[key] = None
        self._note_claim(key, leaf)

    def _note_claim(self, key: str, leaf: StoredNode) -> None:
        other = self._claims.setdefault(id(leaf), key)
        if other != key:
            self.found.misfits[key] = (
                f"is not in the checkpoint; '{leaf.key}' has a similar name, but is loaded into '{other}'"
            )
        if leaf.key not in ("", key) and not leaf.key.startswith("[") and not self._own:
            self.found.renamed[leaf.key] = key

    def _refuse_inert(self, key: str, value: Any) -> None:
        """Note values that cannot be given back as what they were."""
        reason = why_not_restorable(value)
        if reason is not None:
            self.found.misfits[key] = reason
            return
        for name, child in children_of(value) or []:
            self._refuse_inert(f"{key}.{name}" if key else str(name), child)


def _is_empty(stored: StoredNode | None) -> bool:
    return stored is not None and stored.is_leaf and children_of(stored.value) == []


def _leaf_keys(value: Any, path: Path) -> list[str]:
    parts = children_of(value)
    if not parts:
        return [key_of(path)]
    return [key for name, child in parts for key in _leaf_keys(child, (*path, name))]


def _hides_target(value: Any) -> bool:
    """Whether something in a list or tuple is filled in place or speaks for itself."""
    if value is ANYTHING or is_target(value) or is_live(value) or per_rank_of(value) is not None:
        return True
    return any(_hides_target(child) for _, child in children_of(value) or [])


def _ignore(value: Any) -> None:
    """A tensor that was made is put into memory, and not anywhere else."""
