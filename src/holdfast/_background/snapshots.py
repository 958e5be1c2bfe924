"""A private copy of a state, which nothing that the program does later can change.

Containers are rebuilt, tensors of every kind are copied to host memory, and everything else is deep-copied. The copy
of the elements can be put off (``Snapshot.fill_later``), and then happens in another thread; all the rest is done when
the snapshot is taken.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from holdfast._background.arenas import ArenaPool, Memory, aligned
from holdfast._background.copy_jobs import Copies
from holdfast._background.tensor_copies import (
    Storage,
    StorageRange,
    bytes_in,
    bytes_of,
    copy_with,
    fingerprint_of_memory,
    is_wrapper,
    plain_parts,
    storage_of,
    storage_ranges,
    view_like,
)
from holdfast._base.threads import ProcessFuture
from holdfast._layout.checkpointable import copy_fields, is_checkpointable
from holdfast.errors import SnapshotError

_UNCHANGEABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Snapshot:
    """A private copy. ``state`` has its final shape at once, and its elements after ``fill``.

    With ``exact``, tensors that are views of one memory are so in the copy, with the same strides, and keep what a
    program has set on them as attributes. Otherwise only what a save needs is copied.
    """

    def __init__(self, state: dict[str, Any], pool: ArenaPool, *, exact: bool = False) -> None:
        self._exact = exact
        self._storage_ranges = storage_ranges(plain_parts_of_state(state)) if exact else {}
        self._copied: dict[Storage, torch.Tensor] = {}
        self._deep_copies: dict[int, Any] = {}
        self._copies = Copies(watched=False, of_their_own=True)
        self._copies.begin(pool, _bytes_needed(state, self._storage_ranges))
        self.state: dict[str, Any] = self._copy(state, ())
        self._copied = {}
        self._deep_copies = {}

    def fill(self) -> dict[str, Any]:
        """Copy the elements. The source may change as soon as this returns, and not before."""
        self._copies.copy_now()
        return self.state

    def fill_later(self) -> ProcessFuture[dict[str, Any]]:
        """Copy the elements in a thread. The source may change when the future is done, and not before."""
        filled: ProcessFuture[dict[str, Any]] = ProcessFuture("the copy of a state for a background save")
        filled.set_running_or_notify_cancel()
        self._copies.done.add_done_callback(functools.partial(_pass_on, filled, self.state))
        self._copies.copy_later()
        return filled

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, path)
        kind = type(value)
        if kind in _UNCHANGEABLE:
            return value
        if kind in (dict, OrderedDict):
            return kind((key, self._copy(item, (*path, key))) for key, item in value.items())
        if kind in (list, tuple):
            return kind(self._copy(item, (*path, position)) for position, item in enumerate(value))
        # Any other container is copied by its own rules, and finds the copies of its tensors made.
        items = [(key, self._copy(item, (*path, key))) for key, item in _items_of(value)]
        try:
            return self._deep_copy(value, path)
        except SnapshotError:
            if not isinstance(value, Mapping):
                raise
            return dict(items)  # such as the read-only view of a dict, which nobody can copy

    def _copy_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        if self._exact and id(tensor) in self._deep_copies:
            again: torch.Tensor = self._deep_copies[id(tensor)]
            return again
        try:
            twin = copy_with(tensor, functools.partial(self._reserve, ".".join(map(str, path))))
        except Exception as error:
            raise _cannot_copy(tensor, path, error) from error
        if is_checkpointable(tensor):
            twin = _another_object(twin)  # tied tensors may say different things of themselves
            copy_fields(tensor, twin)
        self._deep_copies[id(tensor)] = twin
        if self._exact:
            self._copy_attributes(tensor, twin)
        return twin

    def _copy_attributes(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        parts = vars(twin).keys() if is_wrapper(tensor) else ()  # a wrapper's parts are copied already
        for name, value in vars(tensor).items():
            if name not in parts:
                setattr(twin, name, self._copy_attribute(value))

    def _copy_attribute(self, value: Any) -> Any:
        """A private copy if there can be one. Attributes are not saved, so the thing itself will do otherwise."""
        try:
            if isinstance(value, torch.Tensor):
                known = self._deep_copies.get(id(value))
                return copy_with(value, _fresh_copy) if known is None else known
            return self._try_deep_copy(value)
        except Exception:
            return value

    def _reserve(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A place for a plain tensor's elements, which ``fill`` brings there."""
        storage = storage_of(tensor) if self._exact else None
        if storage is not None:
            used = self._storage_ranges[storage]
            if storage not in self._copied:
                self._copied[storage] = self._copies.add(key, bytes_in(tensor, used)).twin
            return view_like(tensor, self._copied[storage], used)
        twin: torch.Tensor = self._copies.add(key, tensor).twin
        return twin

    def _deep_copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        try:
            return self._try_deep_copy(value)
        except Exception:
            for tensor in _tensors_inside(value):  # those that came out of a computation have no deep copy
                self._deep_copies.setdefault(id(tensor), copy_with(tensor, _fresh_copy))
        try:
            return self._try_deep_copy(value)
        except Exception as error:
            raise _cannot_copy(value, path, error) from error

    def _try_deep_copy(self, value: Any) -> Any:
        memo = ChainMap({}, self._deep_copies)  # a copy that fails leaves half-made objects in its memo
        made = copy.deepcopy(value, memo)  # type: ignore[arg-type]  # any mapping will do
        self._deep_copies.update(memo.maps[0])
        return made


def _pass_on(filled: Future[dict[str, Any]], state: dict[str, Any], copied: Future[None]) -> None:
    error = copied.exception()
    if error is None:
        filled.set_result(state)
    else:
        filled.set_exception(error)


def plain_parts_of_state(state: Any) -> Iterator[torch.Tensor]:
    """All ordinary tensors that the tensors of a state consist of."""
    for tensor in _tensors_in(state):
        yield from plain_parts(tensor)


def _bytes_needed(state: Any, together: Mapping[Storage, StorageRange]) -> int:
    """``together`` are ranges of memory that are copied once, whatever tensors are views of them."""
    sizes = {
        fingerprint_of_memory(part): aligned(bytes_of(part))
        for part in plain_parts_of_state(state)
        if not together or storage_of(part) is None
    }
    return sum(sizes.values()) + sum(aligned(used.nbytes) for used in together.values())


def _another_object(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements under another tensor object of the same class."""
    return tensor.detach().as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, item in _items_of(value):
            yield from _tensors_in(item)


def _items_of(value: Any) -> list[tuple[Any, Any]]:
    """What a container holds, by key or position. Nothing, if it is not a container."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)) and type(value) not in _UNCHANGEABLE:
        return list(enumerate(value))
    return []


class _TensorFinder(pickle.Pickler):
    """Goes through an object as pickle would, and takes note of the tensors in it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.found.append(obj)
            return len(self.found)
        return None


def _tensors_inside(value: Any) -> list[torch.Tensor]:
    finder = _TensorFinder()
    with suppress(Exception):  # what cannot be pickled cannot be saved either; the caller says so
        finder.dump(value)
    return finder.found


def _fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _cannot_copy(value: Any, path: tuple[Any, ...], error: Exception) -> SnapshotError:
    key = ".".join(map(str, path))
    return SnapshotError(
        f"cannot take a private copy of '{key}', a {type(value).__name__}: {type(error).__name__}: {error}. "
        "Leave it out of the state, or put in what it is made of (tensors, numbers, text, lists, dicts).",
        key=key,
    )


def take_snapshot(state: dict[str, Any], pool: ArenaPool | None = None) -> dict[str, Any]:
    """A private copy of ``state`` in host memory, complete when this returns.

    >>> state = {"weights": torch.zeros(2), "history": [1]}
    >>> copied = take_snapshot(state)
    >>> state["weights"] += 1; state["history"].append(2)
    >>> copied
    {'weights': tensor([0., 0.]), 'history': [1]}
    """
    return Snapshot(state, pool or ArenaPool(Memory.PAGEABLE)).fill()
