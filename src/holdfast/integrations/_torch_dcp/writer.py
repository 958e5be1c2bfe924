"""``HoldfastWriter``: has ``torch.distributed.checkpoint.save`` write a checkpoint of Holdfast's own format."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast._background.snapshots import take_snapshot
from holdfast._base.arguments import Size, checked_size
from holdfast._base.boxes import Box, volume
from holdfast._base.commits import Commit
from holdfast._base.provenance import stamp
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.names import new_generation
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, listed_parts
from holdfast._formats.native.values import JSON, Encoder, decode, leaves
from holdfast._formats.native.writing import (
    CheckpointContents,
    Existing,
    commit_checkpoint,
    inspect_destination,
    remove_unfinished,
    write_chunks,
)
from holdfast._formats.nesting import nested
from holdfast._ranks.failures import pack_failure, unpack_failure, wrap_exception
from holdfast._save.agreement import refuse_bad_tilings
from holdfast._save.local_bytes import bytes_of
from holdfast._save.merged_trees import TYPE, renamed_tensors
from holdfast._save.options import checked_metadata
from holdfast._stores.places import store_at
from holdfast._stores.store import Store
from holdfast.errors import (
    CheckpointException,
    DamagedCheckpointError,
    IncompleteSaveError,
    InvalidPlanError,
    UnsupportedValueError,
)
from holdfast.integrations._torch_dcp.shares import Gathering, WrittenShare, WrittenTensor

# What ``async_save`` of older versions of torch needs from a writer: a copy of the state.
#
# Until 2.8 torch leaves tensors in host memory as they are, so that the program changes them while they are written,
# unless the writer copies the state. Later versions copy it themselves.


class CopiesStates:
    """The methods by which torch recognizes a writer that copies states."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy that nothing that the program does later can change."""
        return take_snapshot(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing is left to be done: a copy is complete when ``stage`` returns it."""


StagingIfNeeded: type = object if "async_stager" in inspect.signature(async_save).parameters else CopiesStates


# From what all ranks have written to the contents of one checkpoint. It happens on the coordinator.


@dataclass(frozen=True)
class Assembled:
    """The tensors and the tree of a checkpoint, its files, and the numbers that the tensors have there."""

    tensors: Sequence[TensorRef]
    tree: JSON
    files: Sequence[StoredFile]
    tensor_lists: Sequence[Sequence[int]]
    parts: Sequence[StoredParts]
    keys: Mapping[str, str]
    """Of the tensors that have a name of torch's: what they are called in the checkpoint."""


def assemble(names: Sequence[str], paths: object, shares: Sequence[WrittenShare]) -> Assembled:
    """Put the parts together. ``names`` are all that torch has planned, ``paths`` where they belong in the state.

    Raises if something was not written, or if chunks do not tile their tensors.
    """
    owners = _owners(names, shares)
    stored = _by_name(owners, shares)
    numbers = {(tensor.fqn, tensor.part): number for number, tensor in enumerate(stored)}
    nodes = {name: _node(name, owner, numbers) for name, owner in owners.items()}
    tree, keys = _tree(nodes, paths)
    files, tensor_lists = _renumbered(shares, owners, numbers)
    ranks = _boxes(shares, owners, numbers)
    boxes = [list(found) for found in ranks]
    tensors = []
    for number, tensor in enumerate(stored):
        whole = len(boxes[number]) <= 1
        ref = TensorRef(
            key=keys[str(number)],
            dtype=dtype_named(tensor.dtype),
            shape=tensor.shape,
            kind="replicated" if whole else "sharded",
            numpy=tensor.numpy,
        )
        tensors.append(ref)
    refuse_bad_tilings(zip(tensors, boxes, strict=True))
    named = {tensor.fqn: keys[str(number)] for number, tensor in enumerate(stored) if tensor.part is None}
    parts = [_parts(ref, found) for ref, found in zip(tensors, ranks, strict=True)]
    return Assembled(tensors, tree, files, tensor_lists, parts, named)


def _parts(ref: TensorRef, ranks: Mapping[Box, int]) -> StoredParts:
    """Which rank has stored which box of a tensor."""
    if len(ranks) <= 1:
        return PartsByRule(WHOLE, next(iter(ranks.values()), 0))
    return listed_parts((box.offsets, box.sizes, rank) for box, rank in ranks.items())


def _owners(names: Sequence[str], shares: Sequence[WrittenShare]) -> dict[str, WrittenShare | None]:
    """Whose tensors count under each name: of a value, those of the first rank that has written it; else all."""
    owners: dict[str, WrittenShare | None] = dict.fromkeys(names)
    for share in reversed(shares):
        owners.update((name, share) for name in share.values if name in owners)
    return owners


def _counts(tensor: WrittenTensor, share: WrittenShare, owners: Mapping[str, WrittenShare | None]) -> bool:
    owner = owners.get(tensor.fqn)
    return tensor.fqn in owners and (owner is share if tensor.part is not None else owner is None)


def _by_name(owners: Mapping[str, WrittenShare | None], shares: Sequence[WrittenShare]) -> list[WrittenTensor]:
    """Every tensor once, in the order of the names."""
    found: dict[str, dict[int | None, WrittenTensor]] = {name: {} for name in owners}
    for share in shares:
        for tensor in share.tensors:
            if not _counts(tensor, share, owners):
                continue
            first = found[tensor.fqn].setdefault(tensor.part, tensor)
            if first != tensor:
                raise InvalidPlanError(
                    f"ranks have given parts of '{tensor.fqn}' as different tensors: of shape {list(first.shape)} and "
                    f"{first.dtype}, and of shape {list(tensor.shape)} and {tensor.dtype}. Nothing was saved.",
                    problems=[tensor.fqn],
                )
    missing = [name for name, owner in owners.items() if owner is None and not found[name]]
    if missing:
        raise IncompleteSaveError(
            f"{len(missing)} planned item(s) were not written, such as '{missing[0]}'. Nothing was saved.",
            missing=missing,
        )
    return [tensor for parts in found.values() for tensor in parts.values()]


def _node(name: str, owner: WrittenShare | None, numbers: Mapping[tuple[str, int | None], int]) -> JSON:
    """The typed value under a name. Tensors are referred to by their numbers."""
    if owner is None:
        return {TYPE: "tensor", "key": str(numbers[name, None])}
    value = owner.values[name]
    labels: dict[str, str] = {}
    while (name, len(labels)) in numbers:
        labels[str(len(labels))] = str(numbers[name, len(labels)])
    return renamed_tensors(value, labels) if labels else value


def _tree(nodes: Mapping[str, JSON], paths: object) -> tuple[JSON, dict[str, str]]:
    """The state with everything at its path, and what the tensors of each number are called there."""
    content = list(nodes.values())
    # Containers are stored by those who know how. Arrays stand for the leaves, since they are what can be referred to.
    state = nested({name: np.array(number) for number, name in enumerate(nodes)}, paths)
    tree = _filled(Encoder(lambda path, place: str(int(place))).encode(state), content)
    keys: dict[str, str] = {}
    try:
        for leaf in leaves(tree):
            if leaf.is_tensor:
                leaf.node["key"] = keys.setdefault(leaf.node["key"], leaf.key)
        decode(tree, tensor=str)  # what is committed can be read again, also if it is too deep only as a whole
    except DamagedCheckpointError as error:
        raise UnsupportedValueError(f"the state cannot be stored: {error.found}. Nothing was saved.", key="") from error
    return tree, keys


def _filled(tree: JSON, content: Sequence[JSON]) -> JSON:
    if isinstance(tree, list):
        return [_filled(child, content) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == "tensor":
            return content[int(tree["key"])]
        return {name: _filled(child, content) for name, child in tree.items()}
    return tree


def _renumbered(
    shares: Sequence[WrittenShare],
    owners: Mapping[str, WrittenShare | None],
    numbers: Mapping[tuple[str, int | None], int],
) -> tuple[list[StoredFile], list[list[int]]]:
    """All files, and the lists that say which tensors of the checkpoint their tensor numbers are.

    Ranks number the tensors that they write as they come. Many write the same ones, and have one list then.
    """
    files: list[StoredFile] = []
    lists: dict[tuple[int, ...], int] = {}
    for share in shares:
        # What does not count is of no tensor, but has its number of dimensions.
        listed = tuple(
            numbers[tensor.fqn, tensor.part] if _counts(tensor, share, owners) else -1 - len(tensor.shape)
            for tensor in share.tensors
        )
        for file in share.files:
            assert file.table is not None
            inside = [number for number in listed[file.table.first : file.table.last + 1] if number >= 0]
            table = replace(
                file.table,
                first=min(inside, default=0),
                last=max(inside, default=-1),
                tensor_list=lists.setdefault(listed, len(lists)),
            )
            files.append(replace(file, table=table))
    return files, [list(listed) for listed in lists]


def _boxes(
    shares: Sequence[WrittenShare],
    owners: Mapping[str, WrittenShare | None],
    numbers: Mapping[tuple[str, int | None], int],
) -> list[dict[Box, int]]:
    """The boxes that each tensor is stored in, and who has them. What several ranks have written counts once."""
    boxes: list[dict[Box, int]] = [{} for _ in numbers]
    for share in shares:
        counts = [_counts(tensor, share, owners) for tensor in share.tensors]
        for number, box in share.boxes:
            tensor = share.tensors[number]
            if counts[number]:
                boxes[numbers[tensor.fqn, tensor.part]].setdefault(box, share.rank)
    return boxes


logger = logging.getLogger(__name__)

NOT_FLATTENED = "not_flattened"
"""Noted in a checkpoint whose planner took the top-level keys as names, and what is below as values."""


class HoldfastWriter(StorageWriter, StagingIfNeeded):  # type: ignore[misc]
    """Give this to ``save`` or ``async_save`` of ``torch.distributed.checkpoint`` as ``storage_writer``.

    The checkpoint appears at once and complete when everything is durable, or not at all. What a failed save has
    written is removed.

    Args:
        path: a folder, ``memory://name``, or a store; may be given as ``checkpoint_id`` instead.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error on all ranks.
        metadata: anything that JSON can hold, to be found in the checkpoint.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: bytes of data in one file at most.

    Example:
        >>> import tempfile, torch, warnings
        >>> import holdfast
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # torch notes that there is just one process
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> _ = dcp.save({"model": {"w": torch.arange(4.0)}, "step": 100}, storage_writer=holdfast.HoldfastWriter(path))
        >>> holdfast.open(path)["model.w"][1:3], holdfast.open(path)["step"]
        (tensor([1., 2.]), 100)
        >>> state = {"model": {"w": torch.zeros(4)}, "step": 0}
        >>> dcp.load(state, storage_reader=holdfast.HoldfastReader(path))
        >>> state
        {'model': {'w': tensor([0., 1., 2., 3.])}, 'step': 100}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store | None = None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        max_file_size: Size | None = None,
    ) -> None:
        self.overwrite = overwrite
        self.metadata = checked_metadata(metadata)
        self.allow_pickle = allow_pickle
        self.max_file_size = checked_size("max_file_size", max_file_size)
        self._store = None if path is None else store_at(path)
        self._rank = 0
        self._existing: Existing | None = None

    # The methods below are in the order in which torch calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at another place if one is given."""
        if checkpoint_id is not None:
            self._store = store_at(checkpoint_id)
        self._existing = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this names a place that a checkpoint can be written to."""
        try:
            store_at(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Where the checkpoint will be."""
        return None if self._store is None else StorageMeta(checkpoint_id=self._store.location)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn which rank this is."""
        self._rank = _own_rank(kwargs.get("rank"))
        self._existing = None
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "HoldfastWriter cannot save with use_collectives=False: the parts of all ranks become one checkpoint "
                "in one step, for which they must meet. Leave use_collectives out."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is, if there is a place to write to."""
        self._place()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are, unless a checkpoint is in the way."""
        self._existing = inspect_destination(self._place(), overwrite=self.overwrite)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        An error is returned as a result and raised by ``finish``, because nobody would have the other ranks remove what
        they have written.
        """
        share = WrittenShare(self._rank)
        try:
            self._write(plan, planner, share)
        except Exception as error:
            share.failure = pack_failure(wrap_exception(error))
        written: Future[list[WriteResult]] = Future()
        # Pickled together, all results share one copy of it.
        written.set_result([WriteResult(item.index, _nbytes(item), share) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the record in place, which makes the files of all ranks a checkpoint. On failure remove them."""
        shares = [part[0].storage_data for part in results if part]
        store, generation, commit = self._place(), new_generation(), Commit()
        try:
            _raise_failures(shares)
            assembled = assemble(list(metadata.state_dict_metadata), metadata.planner_data, shares)
            noted = stamp(len(results)) | {"through": "torch.distributed.checkpoint"}
            if metadata.planner_data is None:
                noted[NOT_FLATTENED] = True
            contents = CheckpointContents(
                assembled.tensors,
                assembled.tree,
                self.metadata,
                noted,
                assembled.parts,
                world_size=max([len(results), *(share.rank + 1 for share in shares)]),
                tensor_lists=assembled.tensor_lists,
            )
            existing = self._existing or inspect_destination(store, overwrite=self.overwrite)
            record = commit_checkpoint(store, existing, assembled.files, contents, generation, commit=commit)
        except BaseException:
            if not commit.may_have_happened:
                remove_unfinished(store, [file.name for share in shares for file in share.files])
            raise
        _complete(metadata, assembled, StorageMeta(checkpoint_id=store.location, save_id=generation))
        nbytes = sum(file.nbytes for file in record.files)
        logger.info("saved %d tensors, %d bytes, to %s", len(record.tensors), nbytes, store.location)

    def _write(self, plan: SavePlan, planner: SavePlanner, share: WrittenShare) -> None:
        gathering = Gathering(planner, share, allow_pickle=self.allow_pickle)
        gathering.take(plan)
        share.files = write_chunks(
            self._place(),
            gathering.chunks,
            bytes_of(gathering.local),
            # Every rank draws its own: plans that torch keeps for the next save would carry an old one to it.
            generation=new_generation(),
            rank=self._rank,
            max_file_size=self.max_file_size,
        )

    def _place(self) -> Store:
        if self._store is None:
            raise ValueError("HoldfastWriter was given no path. Pass one to it, or checkpoint_id to save.")
        return self._store


def _own_rank(given: int | None) -> int:
    """Not every version of torch says which rank it is: 2.8 and older ones do not."""
    if given is not None:
        return given
    return dist.get_rank() if dist.is_initialized() else 0


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else volume(data.chunk.sizes) * data.properties.dtype.itemsize


def _raise_failures(shares: list[WrittenShare]) -> None:
    failures = {share.rank: unpack_failure(share.failure) for share in shares if share.failure is not None}
    if failures:
        raise CheckpointException("write", failures)


def _complete(metadata: Metadata, assembled: Assembled, meta: StorageMeta) -> None:
    """Note in what torch hands to the caller under which key each chunk is stored."""
    metadata.storage_meta = meta
    metadata.storage_data = {
        MetadataIndex(name, chunk.offsets): assembled.keys[name]
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
