"""The default load planners: fill the state that is given, or build one from what the checkpoint holds."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from holdfast import _settings as settings
from holdfast._base.nested import FlatState, Location, ObjectPath, flat_name, flatten, flatten_v_2_3, set_element
from holdfast._base.notices import warn_caller
from holdfast._dcp.load_problems import LoadProblems, unloaded_under
from holdfast._dcp.planner import LoadPlanner, keeps_items_apart
from holdfast._dcp.read_items import create_read_item_for_bytes, create_read_items_for_chunk_list
from holdfast._dcp.state_objects import create_chunk_list, find_state_dict_object, is_ordinary, size_and_dtype
from holdfast._formats.archives.values import decode_value
from holdfast._formats.dcp.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._layout.materialize import materialize
from holdfast._layout.tensor_items import on_this_rank
from holdfast._layout.tensor_kinds import KIND, TO_LOAD, is_partitioned
from holdfast._settings import OnFinding
from holdfast.errors import StateMismatchError

logger = logging.getLogger(__name__)

_MOST_SHOWN = 10


class DefaultLoadPlanner(LoadPlanner):
    """Fills tensors in place and replaces values.

    Subclasses change what is loaded by overriding ``create_local_plan``, ``lookup_tensor`` or ``transform_tensor``.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_pickle: bool | None = None,
        dtype_change: OnFinding | None = None,
    ) -> None:
        if dtype_change is not None:
            settings.check("dtype_change", dtype_change)
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.takes_what_is_there = allow_partial_load
        self.allow_pickle = allow_pickle
        self.dtype_change = dtype_change
        self.original_state_dict: STATE_DICT_TYPE = {}
        self.state_dict: STATE_DICT_TYPE = {}
        self.mappings: dict[str, ObjectPath] = {}
        self.metadata: Metadata | None = None
        self.is_coordinator = False
        self._locations: dict[str, Location] = {}
        self._were_meta: dict[Location, torch.Tensor] = {}

    def undo_set_up(self) -> None:
        """Called by the load flow when planning failed on any rank: what was a meta tensor is one again."""
        for location, tensor in self._were_meta.items():
            set_element(self.original_state_dict, location, tensor)
        self._were_meta = {}

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state, give meta tensors memory, and fall back to old key rules if the checkpoint is old."""
        self._were_meta = {}
        self._were_meta = materialize(state_dict)
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        if self.flatten_state_dict:
            flat = _flatten_like(state_dict, metadata)
            self.state_dict, self.mappings, self._locations = flat.values, flat.paths, flat.locations
        else:
            self.state_dict = dict(state_dict)

    def create_local_plan(self) -> LoadPlan:
        """Read items for all that the state asks for, or one error with everything that does not fit."""
        if self.metadata is None:
            raise AssertionError("the planner has no metadata; set_up_planner comes first")
        plan = plan_load(
            self.state_dict,
            self.metadata,
            strict=not self.allow_partial_load,
            dtype_change=self.dtype_change or settings.current().dtype_change,
        )
        if self.is_coordinator and self.flatten_state_dict:
            self._warn_of_unloaded(self.metadata)
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it asked for."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Take this rank's part."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a stored value and put it where the state has it, under the key that the state uses."""
        fqn = read_item.dest_index.fqn
        decoded = self.decode(fqn, value)
        current = self.state_dict.get(fqn)
        if isinstance(current, torch.Tensor) and isinstance(decoded, (bool, int, float, complex)):
            self._fill_with_number(fqn, current.detach(), decoded)
            return
        self.state_dict[fqn] = decoded
        if self.flatten_state_dict:
            place = self._locations.get(fqn) or self.mappings.get(fqn) or (fqn,)
            set_element(self.original_state_dict, place, decoded)
        else:
            self.original_state_dict[fqn] = decoded

    def decode(self, fqn: str, value: io.BytesIO) -> Any:
        """The value behind its stored form. A reader that has checked the bytes already says so."""
        allowed = settings.current().allow_pickle if self.allow_pickle is None else self.allow_pickle
        return decode_value(
            value.getvalue(),
            source=getattr(value, "name", "the checkpoint"),
            key=fqn,
            allow_pickle=allowed,
            verify=getattr(value, "verify", True),
        )

    def _fill_with_number(self, fqn: str, target: torch.Tensor, number: complex) -> None:
        """Put a stored number into a tensor of one element, if it stays the same number there."""
        stored = torch.tensor(number).dtype
        on_change = self.dtype_change or settings.current().dtype_change
        if on_change != "ignore" and not torch.can_cast(stored, target.dtype):
            raise StateMismatchError(
                f"'{fqn}' is the number {number} in the checkpoint, which a tensor of {target.dtype} cannot hold. "
                f"Put a tensor of {stored} there.",
                dtypes={fqn: (stored, target.dtype)},
            )
        target.fill_(number)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The region of the destination that the item fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    @keeps_items_apart
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The data is already in place."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor that ``index`` names."""
        found: torch.Tensor = find_state_dict_object(self.state_dict, index)
        return found

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``tensor`` that the item fills."""
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if start or length != tensor.size(dim):
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def _warn_of_unloaded(self, metadata: Metadata) -> None:
        """Warn of stored state below the asked-for keys that has no place: a fresh optimizer is the usual case."""
        left = unloaded_under(self.original_state_dict, self.state_dict, metadata)
        if left:
            shown = ", ".join(left[:_MOST_SHOWN]) + (", …" if len(left) > _MOST_SHOWN else "")
            warn_caller(
                f"{len(left)} key(s) of the checkpoint have no place in the state given and are not loaded: {shown}. "
                "If this is optimizer state, the optimizer must have state tensors before loading "
                "(get_optimizer_state_dict makes them)."
            )


def plan_load(state_dict: Mapping[str, Any], metadata: Metadata, *, strict: bool, dtype_change: OnFinding) -> LoadPlan:
    """Plan the load of a flat state; all that does not fit is raised together."""
    stored = metadata.state_dict_metadata
    problems = LoadProblems(stored)
    items: list[ReadItem] = []
    for fqn, target in state_dict.items():
        entry = stored.get(fqn)
        if entry is None:
            if strict:
                problems.missing.append(fqn)
            else:
                logger.info("partial load: '%s' is not in the checkpoint and stays as it is", fqn)
        elif isinstance(entry, BytesStorageMetadata):
            if isinstance(target, torch.Tensor) and target.numel() != 1:
                problems.kinds[fqn] = "is a tensor in the state but a plain value in the checkpoint"
            items.append(create_read_item_for_bytes(fqn))
        elif not isinstance(target, torch.Tensor):
            problems.kinds[fqn] = (
                f"is a {type(target).__name__} in the state but a tensor of size {list(entry.size)} in the checkpoint; "
                f"put a tensor of that size there. (Invalid checkpoint metadata for {fqn}, expected "
                "BytesStorageMetadata.)"
            )
        elif is_ordinary(target) and entry.size == target.size():
            if entry.properties.dtype != target.dtype:
                problems.note_dtype(fqn, entry.properties.dtype, target.dtype)
            items.extend(_fill(fqn, entry, partial(_all_of, target), problems))
        else:
            size, dtype = size_and_dtype(target)
            if is_partitioned(target):
                problems.kinds[fqn] = f"is {KIND}; {TO_LOAD}"
            elif entry.size != size:
                problems.shapes[fqn] = (entry.size, size)
            elif on_this_rank(target):
                if entry.properties.dtype != dtype:
                    problems.note_dtype(fqn, entry.properties.dtype, dtype)
                items.extend(_fill(fqn, entry, partial(create_chunk_list, target, key=fqn), problems))
    problems.raise_or_warn(dtype_change)
    return LoadPlan(items)


def _fill(
    fqn: str, entry: TensorStorageMetadata, chunks: Callable[[], list[ChunkStorageMetadata]], problems: LoadProblems
) -> list[ReadItem]:
    try:
        return create_read_items_for_chunk_list(fqn, entry, chunks())
    except StateMismatchError as error:
        problems.uncovered.update(error.uncovered)
        return []


def _all_of(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())]


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """What this rank reads to fill a flat state."""
    return plan_load(state_dict, metadata, strict=strict, dtype_change=settings.current().dtype_change)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Every rank reads what it asked for."""
    return all_plans


def _flatten_like(state_dict: STATE_DICT_TYPE, metadata: Metadata | None) -> FlatState:
    """Flatten as the checkpoint did: keys of torch 2.3 and before look different for values in nested dicts."""
    flat = flatten(state_dict)
    if metadata is None:
        return flat
    unmatched = metadata.state_dict_metadata.keys() - flat.values.keys()
    if unmatched and not flat.values.keys() <= metadata.state_dict_metadata.keys():
        old = flatten_v_2_3(state_dict)
        if unmatched & old.values.keys():
            return old
    return flat


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Builds the state from the checkpoint itself: whole tensors in CPU memory, values as stored.

    ``keys`` selects what is loaded: full keys, or the beginnings of paths (``"model"``, ``"model.layer1"``).
    """

    def __init__(self, keys: Iterable[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = None if keys is None else {keys} if isinstance(keys, str) else set(keys)
        super().__init__(*args, **kwargs)
        self.takes_what_is_there = True

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill the given (empty) dict with places for all that is selected."""
        # The flow sets a planner up again when one rank's part of a checkpoint turns out not to be enough.
        if state_dict and state_dict is not self.original_state_dict:
            raise AssertionError("this planner builds the state itself and needs an empty dict to begin with")
        if metadata is None:
            raise AssertionError("this planner builds the state from metadata, and none was given")
        state_dict.clear()
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.original_state_dict = state_dict
        self.state_dict, self.mappings, self._locations = {}, {}, {}
        if not self.allow_partial_load:
            self._refuse_unknown_keys(metadata)
        for fqn, entry in metadata.state_dict_metadata.items():
            if not self._should_include_key(fqn, metadata):
                continue
            place: Any = "<to be loaded>"
            if isinstance(entry, TensorStorageMetadata):
                place = torch.empty(entry.size, dtype=entry.properties.dtype)
            path = _stored_path(fqn, metadata) if self.flatten_state_dict else (fqn,)
            set_element(state_dict, path, place)
            self.state_dict[fqn] = place
            self.mappings[fqn] = self._locations[fqn] = path

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        """Whether a stored key is selected, by its full name or by the beginning of its path."""
        return self.keys is None or not self.keys.isdisjoint(_names_for(key, metadata))

    def _refuse_unknown_keys(self, metadata: Metadata) -> None:
        known = {name for key in metadata.state_dict_metadata for name in _names_for(key, metadata)}
        problems = LoadProblems(sorted(known))
        problems.missing.extend(sorted((self.keys or set()) - known))
        problems.raise_or_warn("ignore")

    def _warn_of_unloaded(self, metadata: Metadata) -> None:
        """What was not selected is meant to stay behind."""


def _stored_path(fqn: str, metadata: Metadata) -> ObjectPath:
    """Where a key was in the state that was saved; at the top if the checkpoint does not say."""
    paths = metadata.planner_data
    path: ObjectPath = paths.get(fqn, (fqn,)) if isinstance(paths, Mapping) else (fqn,)
    return path


def _names_for(fqn: str, metadata: Metadata) -> set[str]:
    """The names that select a stored key: its own, and those of all that it is in."""
    path = _stored_path(fqn, metadata)
    return {fqn, *(flat_name(path[:length]) for length in range(1, len(path) + 1))}


# A load planner for storages that do not list their contents: the state itself says what is expected there.


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Loads like ``DefaultLoadPlanner``; if the storage has no index, it expects exactly what the state has.

    Only tensors can be expected in this way. ``BroadcastingTorchSaveReader`` reads the index out of its file, so that
    with it values are loaded too, and missing keys and wrong shapes are found before anything is changed.
    """

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state, and describe it if nobody else has described what is stored."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None or (not metadata.state_dict_metadata and metadata.planner_data is None):
            entries: Any = {key: _whole(key, value) for key, value in self.state_dict.items()}
            self.metadata = Metadata(entries)


def _whole(key: str, tensor: Any) -> TensorStorageMetadata:
    """A tensor that is stored in one piece, of the size that it has on all ranks together."""
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(  # noqa: TRY004 - the type that callers know from torch
            f"Non-tensor value identified at {key}. At this time DynamicMetaLoadPlanner only supports loading Tensors."
        )
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), _all_of(tensor))
