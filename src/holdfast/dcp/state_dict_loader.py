"""``load`` and its older form."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from holdfast._base.notices import warn_caller
from holdfast._dcp.load import load_state
from holdfast._dcp.load_planner import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.storage import StorageReader
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE
from holdfast._layout.tensor_kinds import not_loadable, partitioned_in
from holdfast._ranks.meeting import drop_in_meeting
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.filesystem import AnyPath
from holdfast.dcp._storage_utils import _refuse_stock_objects, _storage_setup
from holdfast.dcp.logger import _dcp_method_logger
from holdfast.dcp.utils import _api_bc_check, _is_stateful, _profile, _runs_alone, _sorted_keys, _state_of

__all__ = ["load", "load_state_dict"]


@_dcp_method_logger(log_exceptions=True)
@_api_bc_check
def load(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: AnyPath | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into ``state_dict``, whatever number of ranks and layout it was saved with.

    Tensors are filled in place, other values replaced, and ``Stateful`` objects at the top level are given their state.
    Nothing is changed unless everything that the state asks for is in the checkpoint with the right shape. If a
    ``load_state_dict`` raises, its exception is raised on that rank, and the others get a ``CheckpointException``.

    Args:
        state_dict: what to load into, nested like the state that was saved. It may be a part of it.
        checkpoint_id: the path of the checkpoint. Taken from the reader if not given.
        storage_reader: where to read. A ``FileSystemReader`` by default.
        planner: what to read. A ``DefaultLoadPlanner`` by default.
        process_group: the ranks that take part. All by default.
        no_dist: load in this process alone even if there is a group.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp.save({"weights": torch.ones(4), "step": 7}, checkpoint_id=path)
        >>> state = {"weights": torch.zeros(4), "step": 0}
        >>> dcp.load(state, checkpoint_id=path)
        >>> state
        {'weights': tensor([1., 1., 1., 1.]), 'step': 7}
    """
    alone = _runs_alone(no_dist, "load")
    with drop_in_meeting("holdfast.dcp.load", process_group, alone=alone, place=checkpoint_id) as ranks:
        _perform_load(ranks, state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, planner=planner)


def _perform_load(
    ranks: Collectives,
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: AnyPath | None,
    storage_reader: StorageReader | None,
    planner: LoadPlanner | None,
) -> None:
    """Load with the given ranks."""
    keys = _sorted_keys(state_dict)

    def prepare() -> tuple[StorageReader, STATE_DICT_TYPE]:
        _refuse_stock_objects(storage_reader, planner)
        reader = cast(StorageReader, _storage_setup(storage_reader, checkpoint_id, reader=True))
        lost = partitioned_in(state_dict)
        if lost:
            raise not_loadable(lost)
        return reader, {key: _state_of(state_dict[key]) for key in keys}

    def hand_over() -> None:
        for key in keys:
            if _is_stateful(state_dict[key]):
                state_dict[key].load_state_dict(loaded[key])
            else:
                state_dict[key] = loaded[key]

    reader, loaded = ranks.own_error_first("plan", prepare)
    with _profile():
        load_state(loaded, reader, DefaultLoadPlanner() if planner is None else planner, ranks)
    ranks.own_error_first("load_state_dict", hand_over)


def load_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """The older form of ``load``: it knows no ``Stateful`` objects, and needs a group or ``no_dist``."""
    warn_caller("`load_state_dict` is deprecated; use `load`", FutureWarning)
    storage_reader.reset()
    with _profile():
        _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    with drop_in_meeting("holdfast.dcp.load", process_group, alone=no_dist, coordinator_rank=coordinator_rank) as ranks:
        load_state(state_dict, storage_reader, DefaultLoadPlanner() if planner is None else planner, ranks)


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: AnyPath | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, or the parts of it that ``keys`` name, into a new dict of whole tensors.

    A key may be a full one or the beginning of a path: ``"model"`` loads all of the model. One that selects nothing is
    an error.
    """
    alone = _runs_alone(False, "load")
    with drop_in_meeting("holdfast.dcp.load", process_group, alone=alone, place=checkpoint_id) as ranks:
        reader = ranks.own_error_first("plan", lambda: _storage_setup(storage_reader, checkpoint_id, reader=True))
        state: dict[str, Any] = {}
        load_state(state, cast(StorageReader, reader), EmptyStateDictLoadPlanner(keys), ranks)
    return state
