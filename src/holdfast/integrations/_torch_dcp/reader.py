"""``HoldfastReader``: has ``torch.distributed.checkpoint.load`` read what Holdfast reads."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast._background.copy_jobs import finish_copies
from holdfast._base.boxes import Box, volume
from holdfast._base.notices import warn_caller
from holdfast._base.tuning import STOCK_BATCH_BYTES
from holdfast._formats.archives.values import encode_value
from holdfast._formats.native.decoding import PLAIN
from holdfast._formats.native.refs import PerRankValues, PickledValue, TensorRef, UnknownValue
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._formats.native.trees import children_of, mapped, refs_in, substituted
from holdfast._formats.native.values import Path
from holdfast._formats.source import ReadRequest, Source
from holdfast._load.filling import Fill, Region, read_regions
from holdfast._load.opening import open_source
from holdfast._load.targets import why_not_fillable
from holdfast._load.tensor_handles import as_elements
from holdfast._ranks.meeting import own_place
from holdfast._stores.places import local_path
from holdfast._stores.store import Store
from holdfast.errors import RankDisagreementError, RefusedPickleError, StateMismatchError, UnsupportedStateError
from holdfast.integrations._torch_dcp.writer import NOT_FLATTENED

# A stored state under the names that torch's planners give to what is in a state.


@dataclass(frozen=True)
class NamedLeaves:
    """The leaves of a state by name, with their paths, and what has no name that one could load it by."""

    leaves: dict[str, Any] = field(default_factory=dict)
    """Values with references in place of tensors, or references."""
    paths: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Names, with the reason."""


def flat_state(tree: Mapping[Any, Any], rank: int, world_size: int, *, top_level_only: bool = False) -> NamedLeaves:
    """Flatten a state as torch's planners do.

    Dicts are opened, and lists that hold a dict or a tensor; all else is a value. Of per-rank state,
    this rank's is taken if there are as many ranks as there were.

    >>> flat_state({"model": {"w": 1}, "betas": (0.9, 0.99), "groups": [{"lr": 0.1}]}, 0, 1).leaves
    {'model.w': 1, 'betas': (0.9, 0.99), 'groups.0.lr': 0.1}
    """
    found = NamedLeaves()
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
    """In place of per-rank state that no rank of this program had."""

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


_MOST_SHOWN = 10


@dataclass(frozen=True)
class _Opened:
    source: Source
    state: NamedLeaves


class HoldfastReader(StorageReader):
    """Give this to ``load`` of ``torch.distributed.checkpoint`` as ``storage_reader``.

    It reads every checkpoint that ``holdfast.open`` reads, on any number of ranks. Values come from stored data alone:
    nothing in a checkpoint is run.

    Args:
        path: what ``holdfast.open`` takes; may be given as ``checkpoint_id`` instead.
        allow_pickle: load values that were stored as pickles, which can run any code.
        verify: compare the digests of all that is read.

    Example:
        >>> import tempfile, torch, warnings
        >>> import holdfast
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # torch notes that there is just one process
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 0}
        >>> dcp.load(state, storage_reader=holdfast.HoldfastReader(path))
        >>> state["step"]
        100
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store | None = None,
        *,
        allow_pickle: bool = False,
        verify: bool = True,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.verify = verify
        self._path = _anchored(path)
        self._opened: _Opened | None = None

    # The methods below are in the order in which torch calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at another place if one is given."""
        if checkpoint_id is not None:
            self._path = _anchored(checkpoint_id)
        self._opened = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint."""
        try:
            open_source(checkpoint_id).close()
        except Exception:
            return False
        return True

    def read_metadata(self) -> Metadata:
        """What is stored, by the names that torch's planners use. Warns of what they have no name for."""
        try:
            return self._read_metadata()
        except Exception as error:
            if not _is_called_by_stock():
                raise
            # Several versions of torch drop any ``Exception`` here and then say that there is no metadata, without why.
            step = "read the metadata"
            raise CheckpointException(step, {own_place(None)[0]: (error, extract_tb(error.__traceback__))}) from error

    def _read_metadata(self) -> Metadata:
        if self._path is None:
            raise ValueError("HoldfastReader was given no path. Pass one to it, or checkpoint_id to load.")
        source = open_source(self._path, allow_pickle=self.allow_pickle)
        tree = source.tree
        if not isinstance(tree, dict):
            raise UnsupportedStateError(
                f"the state in {source.location} is a {type(tree).__name__}, and torch.distributed.checkpoint loads "
                "dicts. Use holdfast.load.",
                kind=type(tree).__name__,
            )
        rank, world_size = own_place(None)
        top_level_only = source.provenance.get(NOT_FLATTENED) is True
        state = flat_state(tree, rank, world_size, top_level_only=top_level_only)
        self._opened = _Opened(source, state)
        _warn_of(state.left_out, source)
        return _described(source, state, paths=not top_level_only)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with a note about which save this rank sees."""
        return replace(plan, storage_data=self._checkpoint().source.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, if all ranks see the same save."""
        views = {rank: str(plan.storage_data) for rank, plan in enumerate(plans)}
        if len(set(views.values())) > 1:
            raise RankDisagreementError(
                f"the ranks see different checkpoints at {self._checkpoint().source.location}. Do all see the same "
                "disk, and does nobody save there now? Nothing was loaded.",
                views=views,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part into the memory that the planner points at, and give it the values."""
        checkpoint = self._checkpoint()
        finish_copies()  # of what is going to be overwritten
        items = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        values = self._values(items, checkpoint)
        # A planner that does something in ``commit_tensor`` may use the same memory for all items.
        at_once = STOCK_BATCH_BYTES if type(planner).commit_tensor is DefaultLoadPlanner.commit_tensor else 0
        for batch in _batches(plan.items, checkpoint.state, at_once):
            targets = [planner.resolve_tensor(item).detach() for item in batch]
            regions = [_region(item, target, checkpoint) for item, target in zip(batch, targets, strict=True)]
            read_regions(regions, checkpoint.source, verify=self.verify)
            for item, target in zip(batch, targets, strict=True):
                planner.commit_tensor(item, target)
        for item, value in zip(items, values, strict=True):  # last, when nothing can fail any more
            planner.load_bytes(item, value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _values(self, items: list[ReadItem], checkpoint: _Opened) -> list[io.BytesIO]:
        """Values in the form in which torch's planners take them."""
        leaves = [(item.storage_index.fqn, checkpoint.state.leaves[item.storage_index.fqn]) for item in items]
        for name, value in leaves:
            _refuse_unreadable(name, value)
        refs = {ref.key: ref for _, value in leaves for ref in refs_in(value)}
        buffers = {key: np.empty(ref.shape, ref.dtype.carrier) for key, ref in refs.items()}
        requests = [ReadRequest(key, (0,) * len(ref.shape), ref.shape, buffers[key]) for key, ref in refs.items()]
        checkpoint.source.read(requests, verify=self.verify)
        elements = {key: as_elements(buffers[key], ref, as_torch=ref.numpy is None) for key, ref in refs.items()}
        return [io.BytesIO(encode_value(substituted(value, lambda ref: elements[ref.key]))) for _, value in leaves]

    def _checkpoint(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError(
                "HoldfastReader has not been asked for its metadata yet; that is the first step of a load"
            )
        return self._opened


def _is_called_by_stock() -> bool:
    """Whether the caller of this one's caller is a step of ``torch.distributed.checkpoint.load``."""
    return sys._getframe(2).f_globals.get("__name__") == state_dict_loader.__name__


def _described(source: Source, state: NamedLeaves, *, paths: bool) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, str] = {}
    for name, value in state.leaves.items():
        if not is_tensor(value):
            entries[name] = BytesStorageMetadata()
            continue
        boxes = source.chunks(value.key) or [Box((0,) * len(value.shape), value.shape)]
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        dtype = torch_dtype(value.dtype)
        assert dtype is not None
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(value.shape), chunks)
        places.update((MetadataIndex(name, chunk.offsets), value.key) for chunk in chunks)
    return Metadata(
        state_dict_metadata=entries,
        planner_data=state.paths if paths else None,
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=source.location, save_id=source.identity),
    )


def _batches(items: Iterable[ReadItem], state: NamedLeaves, most: int) -> Iterator[list[ReadItem]]:
    batch: list[ReadItem] = []
    nbytes = 0
    for item in items:
        if item.type is LoadItemType.BYTE_IO:
            continue
        size = volume(item.lengths) * state.leaves[item.storage_index.fqn].dtype.itemsize
        if batch and nbytes + size > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


def _region(item: ReadItem, target: torch.Tensor, checkpoint: _Opened) -> Region:
    name, lengths = item.storage_index.fqn, tuple(item.lengths)
    chunk = item.storage_index.offset or (0,) * len(lengths)
    offsets = tuple(first + at for first, at in zip(chunk, item.storage_offsets, strict=True))
    region = Region(Fill(name, checkpoint.state.leaves[name], target), Box(offsets, lengths), target)
    problem = why_not_fillable(name, target)
    if tuple(target.shape) != lengths:
        problem = f"has the shape {list(target.shape)} where {list(lengths)} was planned"
    if problem is not None:
        raise StateMismatchError(
            f"'{name}' cannot be loaded: the target {problem}.", kinds={name: problem}, **_NO_OTHERS
        )
    return region


_NO_OTHERS: dict[str, Any] = {"missing": [], "shapes": {}, "dtypes": {}, "uncovered": {}}


def _refuse_unreadable(name: str, value: Any) -> None:
    if isinstance(value, PickledValue):
        raise RefusedPickleError(
            f"'{name}' was stored as a pickle, and loading it can run any code. If you trust its author, pass "
            "HoldfastReader(..., allow_pickle=True).",
            key=name,
            global_name="a pickle",
        )
    if isinstance(value, UnknownValue):
        raise UnsupportedStateError(
            f"'{name}' was saved by a later version of Holdfast, as a {value.type!r}. Load it with that version.",
            kind=value.type,
        )
    for _, child in () if is_plain(value) else children_of(value) or ():
        _refuse_unreadable(name, child)


def _warn_of(left_out: dict[str, str], source: Source) -> None:
    if left_out:
        lines = [f"  '{name}': {reason}" for name, reason in list(left_out.items())[:_MOST_SHOWN]]
        if len(left_out) > _MOST_SHOWN:
            lines.append(f"  and {len(left_out) - _MOST_SHOWN} more")
        warn_caller(
            f"torch.distributed.checkpoint cannot load these entries of {source.location}, holdfast.load can:\n"
            + "\n".join(lines)
        )


def _anchored(place: str | os.PathLike[str] | Store | None) -> str | os.PathLike[str] | Store | None:
    """A relative path is that of now, even if the program changes its folder later."""
    path = None if place is None or place == "" else local_path(place)
    return place if path is None else path
