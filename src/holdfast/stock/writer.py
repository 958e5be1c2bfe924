"""``HoldfastWriter``: has ``torch.distributed.checkpoint.save`` write a checkpoint of Holdfast's own format."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.boxes import volume
from holdfast.budgets import checked_bytes
from holdfast.coordination.committing import Commit
from holdfast.coordination.failures import pack_failure, unpack_failure, wrap_exception
from holdfast.environment import stamp
from holdfast.errors import CheckpointException
from holdfast.formats.native.names import new_generation
from holdfast.stock.assembling import Assembled, assemble
from holdfast.stock.shares import Gathering, Share
from holdfast.stock.staging import StagingIfNeeded
from holdfast.storage.native_files import (
    Before,
    Contents,
    commit_checkpoint,
    look_before,
    remove_unfinished,
    write_chunks,
)
from holdfast.stores.places import store_at
from holdfast.stores.store import Store
from holdfast.verbs.save_options import checked_metadata

logger = logging.getLogger(__name__)

NOT_FLATTENED = "not_flattened"
"""Noted in a checkpoint whose planner took the top-level keys as names, and what is below as values."""


class HoldfastWriter(StorageWriter, StagingIfNeeded):  # type: ignore[misc]
    """Give this to ``save`` or ``async_save`` of ``torch.distributed.checkpoint`` as ``storage_writer``.

    The checkpoint appears at once and whole when everything is durable, or not at all. What a failed save has written
    is removed.

    Args:
        path: a folder, ``memory://name``, or a store; may be given as ``checkpoint_id`` instead.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error on all ranks.
        metadata: anything that JSON can hold, to be found in the checkpoint.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: bytes of data in one file at most.

    Example:
        >>> import tempfile, torch, warnings
        >>> import holdfast as hf
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # torch notes that there is just one process
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> _ = dcp.save({"model": {"w": torch.arange(4.0)}, "step": 100}, storage_writer=hf.HoldfastWriter(path))
        >>> hf.open(path)["model.w"][1:3], hf.open(path)["step"]
        (tensor([1., 2.]), 100)
        >>> state = {"model": {"w": torch.zeros(4)}, "step": 0}
        >>> dcp.load(state, storage_reader=hf.HoldfastReader(path))
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
        max_file_size: int | None = None,
    ) -> None:
        self.overwrite = overwrite
        self.metadata = checked_metadata(metadata)
        self.allow_pickle = allow_pickle
        self.max_file_size = checked_bytes("max_file_size", max_file_size)
        self._store = None if path is None else store_at(path)
        self._rank = 0
        self._before: Before | None = None

    # The methods below are in the order in which torch calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at another place if one is given."""
        if checkpoint_id is not None:
            self._store = store_at(checkpoint_id)
        self._before = None

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
        self._before = None
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
        self._before = look_before(self._place(), overwrite=self.overwrite)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        An error is told as a result and raised by ``finish``, because nobody would tell the other ranks to remove what
        they have written.
        """
        share = Share(self._rank)
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
            contents = Contents(assembled.tensors, assembled.tree, self.metadata, noted)
            before = self._before or look_before(store, overwrite=self.overwrite)
            record = commit_checkpoint(store, before, assembled.files, contents, generation, commit=commit)
        except BaseException:
            if not commit.may_have_happened:
                remove_unfinished(store, [file.name for share in shares for file in share.files])
            raise
        _complete(metadata, assembled, StorageMeta(checkpoint_id=store.location, save_id=generation))
        nbytes = sum(file.nbytes for file in record.files)
        logger.info("saved %d tensors, %d bytes, to %s", len(record.tensors), nbytes, store.location)

    def _write(self, plan: SavePlan, planner: SavePlanner, share: Share) -> None:
        gathering = Gathering(planner, share, allow_pickle=self.allow_pickle)
        gathering.take(plan)
        share.files = write_chunks(
            self._place(),
            gathering.chunks,
            gathering.local,
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


def _raise_failures(shares: list[Share]) -> None:
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
