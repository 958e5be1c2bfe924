"""``save`` and its older form."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from holdfast.coordination.collectives import Collectives
from holdfast.dcp._storage_utils import _refuse_stock_objects, _storage_setup
from holdfast.dcp.utils import _api_bc_check, _runs_alone, _state_of
from holdfast.metadata import STATE_DICT_TYPE, Metadata
from holdfast.notices import warn_caller
from holdfast.planning.planner import SavePlanner
from holdfast.planning.save_planner import DefaultSavePlanner
from holdfast.saving import save_state
from holdfast.storage.contract import StorageWriter
from holdfast.stores.filesystem import AnyPath

__all__ = ["save", "save_state_dict"]


@_api_bc_check
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: AnyPath | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state from all ranks of a process group, or from this process alone if there is no group.

    Top-level values with ``state_dict`` and ``load_state_dict`` are asked for their state. Sharded tensors are written
    in parts by the ranks that hold them, everything else once. Returns the index of the checkpoint.

    Args:
        state_dict: what to save: a nesting of dicts, lists, tensors, plain values and ``Stateful`` objects.
        checkpoint_id: the path of the checkpoint. Taken from the writer if not given.
        storage_writer: where and how to write. A ``FileSystemWriter`` by default.
        planner: what to write. A ``DefaultSavePlanner`` by default.
        process_group: the ranks that take part. All by default.
        no_dist: save from this process alone even if there is a group.
        use_collectives: False to let every rank write an index of its own part, without planning together.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> path = tempfile.mkdtemp()
        >>> metadata = dcp.save({"weights": torch.ones(4), "step": 7}, checkpoint_id=path)
        >>> sorted(metadata.state_dict_metadata)
        ['step', 'weights']
    """
    ranks = Collectives(process_group, not _runs_alone(no_dist, "save"), 0)

    def prepare() -> tuple[StorageWriter, STATE_DICT_TYPE]:
        _refuse_stock_objects(storage_writer, planner)
        writer = cast(StorageWriter, _storage_setup(storage_writer, checkpoint_id, reader=False))
        return writer, _stateful_to_state_dict(state_dict)

    writer, states = ranks.own_error_first("plan", prepare)
    return save_state(
        states, writer, DefaultSavePlanner() if planner is None else planner, ranks, use_collectives=use_collectives
    )


def save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """The older form of ``save``: it knows no ``Stateful`` objects, and needs a group or ``no_dist``."""
    warn_caller("`save_state_dict` is deprecated; use `save`", FutureWarning)
    storage_writer.reset()
    return _save_state_dict(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner)


def _save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
) -> Metadata:
    ranks = Collectives(process_group, not no_dist, coordinator_rank)
    return save_state(
        state_dict,
        storage_writer,
        DefaultSavePlanner() if planner is None else planner,
        ranks,
        use_collectives=use_collectives,
    )


def _stateful_to_state_dict(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """The same dict with the state of every ``Stateful`` in its place. They are asked in the order of the dict."""
    return {key: _state_of(value) for key, value in state_dict.items()}
