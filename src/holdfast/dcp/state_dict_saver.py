"""``save``, ``async_save`` and the older form."""

from __future__ import annotations

import functools
import os
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from holdfast._background.arenas import ArenaPool, Memory
from holdfast._background.async_saves import BackgroundSave, give_up_in_background, save_in_background
from holdfast._background.futures import warn_of_unseen_failures
from holdfast._background.messages import in_shared_memory
from holdfast._background.queues import Claim, Lane, wait_for_conflicting_saves
from holdfast._background.stagers import common_pool
from holdfast._base.notices import warn_caller
from holdfast._base.threads import ProcessFuture
from holdfast._compat.groups import default_group, device_types_of
from holdfast._dcp.events import recorded
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.save import save_state
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.storage import StorageWriter
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata
from holdfast._layout.tensor_kinds import partitioned_in, refused
from holdfast._ranks.meeting import drop_in_meeting
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.filesystem import AnyPath
from holdfast._stores.local_filesystem import FileSystem
from holdfast._watching.calls import Call
from holdfast.dcp._storage_utils import _refuse_stock_objects, _storage_setup
from holdfast.dcp.logger import _dcp_method_logger
from holdfast.dcp.staging import AsyncStager, BlockingAsyncStager
from holdfast.dcp.utils import _api_bc_check, _profile, _runs_alone, _state_of

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]


@_dcp_method_logger(log_exceptions=True)
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
    target = _Target(checkpoint_id, storage_writer, planner, use_collectives)
    return _save(state_dict, target, process_group=process_group, coordinator_rank=0, no_dist=no_dist)


class _Target(NamedTuple):
    """Where a save goes, and how."""

    checkpoint_id: AnyPath | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None
    use_collectives: bool = True

    def path(self) -> AnyPath | None:
        """The path of the save, if it is known."""
        if self.checkpoint_id is None or str(self.checkpoint_id) == "":
            return cast("AnyPath | None", getattr(self.storage_writer, "checkpoint_id", None))
        return self.checkpoint_id

    def is_local(self) -> bool:
        """Whether the path is one of the local file system."""
        writer = self.storage_writer
        takes_local_paths = writer is None or isinstance(getattr(writer, "fs", None), FileSystem)
        return takes_local_paths and "://" not in str(self.path())

    def anchored(self) -> _Target:
        """With a path that means the same after a change of the working directory, and in another process."""
        path = self.path()
        return self if path is None or not self.is_local() else self._replace(checkpoint_id=os.path.abspath(path))

    def claim(self) -> Claim:
        """What no other save may use meanwhile."""
        path = self.path()
        if path is not None:
            path = os.path.realpath(path) if self.is_local() else str(path).rstrip("/")
        return Claim(path, self.storage_writer, self.planner)


def _save(
    state_dict: STATE_DICT_TYPE,
    target: _Target,
    *,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    no_dist: bool,
) -> Metadata:
    warn_of_unseen_failures()
    wait_for_conflicting_saves(target.claim())
    alone = _runs_alone(no_dist, "save")
    with drop_in_meeting(
        "holdfast.dcp.save", process_group, alone=alone, place=target.claim(), coordinator_rank=coordinator_rank
    ) as ranks:
        return _perform_save(ranks, state_dict, **target._asdict())


def _perform_save(
    ranks: Collectives,
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: AnyPath | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    use_collectives: bool,
) -> Metadata:
    """Save with the given ranks: in the program, in a thread, or in a writer process."""

    def prepare() -> tuple[StorageWriter, STATE_DICT_TYPE]:
        _refuse_stock_objects(storage_writer, planner)
        writer = cast(StorageWriter, _storage_setup(storage_writer, checkpoint_id, reader=False))
        return writer, _stateful_to_state_dict(state_dict)

    writer, states = ranks.own_error_first("plan", prepare)
    with _profile():
        return save_state(
            states, writer, DefaultSavePlanner() if planner is None else planner, ranks, use_collectives=use_collectives
        )


def _perform_async_save(
    ranks: Collectives, state_dict: STATE_DICT_TYPE, call: Call | None, *, target: _Target
) -> Metadata:
    """The same in the background, where it is recorded as a save of its own."""
    with recorded("save", log_exceptions=True, process_group=ranks.group, **target._asdict()):
        return _perform_save(ranks, state_dict, **target._asdict())


class AsyncCheckpointerType(Enum):
    """Where a background save runs: in a thread of the program, or in a process of its own."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass
class AsyncSaveResponse:
    """The two ends of a background save whose copy is made in the background too.

    After ``staging_completion`` the program may change its state again; after ``upload_completion`` the checkpoint is
    committed.
    """

    staging_completion: Future[None]
    upload_completion: Future[None]


@_dcp_method_logger(log_exceptions=True)
def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: AnyPath | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Take a private copy of a state and save it in the background, with all ranks of a process group.

    Whatever the program does to its state afterwards is not seen by the save. Saves of one group are carried out in
    the order of the calls, on a connection of their own. Saves that are pending when the program ends are finished
    first. A save that failed raises from its future; if nobody looks, the next save and the exit code report it.

    Args:
        state_dict: what to save, as for ``save``.
        checkpoint_id: the path of the checkpoint. Taken from the writer if not given.
        storage_writer: where and how to write. A ``FileSystemWriter`` by default.
        planner: what to write. A ``DefaultSavePlanner`` by default.
        process_group: the ranks that take part. All by default.
        async_checkpointer_type: whether a thread or a process of its own writes. A process does not compete for
            the interpreter with the training loop; writer and planner must be picklable for it.
        async_stager: who takes the copy. By default the writer if it can (``FileSystemWriter`` does), or else a
            ``BlockingAsyncStager``.
        no_dist: save from this process alone even if there is a group.
        use_collectives: False to let every rank write an index of its own part, without planning together.

    Returns:
        A future of the checkpoint's index, or an ``AsyncSaveResponse`` if the stager works in the background.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> state = {"weights": torch.ones(4)}
        >>> saved = dcp.async_save(state, checkpoint_id=tempfile.mkdtemp())
        >>> _ = state["weights"].zero_()                      # training goes on
        >>> sorted(saved.result().state_dict_metadata)        # wait for the end, before it matters
        ['weights']
    """
    return _async_save(
        state_dict,
        _Target(checkpoint_id, storage_writer, planner, use_collectives),
        process_group=process_group,
        coordinator_rank=0,
        no_dist=no_dist,
        in_process=AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS,
        stager=async_stager,
    )


def _async_save(
    state_dict: STATE_DICT_TYPE,
    target: _Target,
    *,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    no_dist: bool,
    in_process: bool = False,
    stager: AsyncStager | None = None,
) -> Future[Metadata] | AsyncSaveResponse:
    target = target.anchored()
    lane = _lane_of(process_group, coordinator_rank, no_dist)
    claim = target.claim()
    try:
        _refuse_unusable(target)
        chosen = _choose_stager(stager, target.storage_writer, in_process)
        states = _stateful_to_state_dict(state_dict)
        with recorded("stage_state_dict", log_exceptions=True):
            staged = chosen.stage(states)
    except BaseException as error:
        # Or else the other ranks would wait for this one.
        give_up_in_background(error, lane, claim, coordinator_rank=coordinator_rank)
        raise
    saved = _queue(staged, target, lane, coordinator_rank, in_process)
    if isinstance(staged, Future):
        return AsyncSaveResponse(_without_value(staged), cast("Future[None]", saved))
    with recorded("maybe_synchronize_staging", log_exceptions=True):
        if chosen.should_synchronize_after_execute:
            chosen.synchronize_staging()
    return saved


def _save_staged(
    staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    target: _Target,
    *,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    no_dist: bool,
    in_process: bool,
) -> Future[Metadata]:
    """Save in the background what somebody else has staged, or is staging."""
    target = target.anchored()
    lane = _lane_of(process_group, coordinator_rank, no_dist)
    try:
        _refuse_unusable(target)
    except BaseException as error:
        give_up_in_background(error, lane, target.claim(), coordinator_rank=coordinator_rank)
        raise
    return _queue(staged, target, lane, coordinator_rank, in_process)


def _lane_of(process_group: dist.ProcessGroup | None, coordinator_rank: int, no_dist: bool) -> Lane:
    """What the group's background saves share."""
    warn_of_unseen_failures()
    alone = _runs_alone(no_dist, "save")
    Collectives(process_group, not alone, coordinator_rank)  # complains of a rank that is not in the group
    if dist.is_available() and dist.is_initialized():
        _require_cpu_backend(process_group)
    return Lane.of(process_group, alone=alone)


def _refuse_unusable(target: _Target) -> None:
    _refuse_stock_objects(target.storage_writer, target.planner)
    if target.path() is None and target.storage_writer is None:
        _storage_setup(None, None)  # says what is missing


def _queue(
    staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    target: _Target,
    lane: Lane,
    coordinator_rank: int,
    in_process: bool,
) -> Future[Metadata]:
    box = [staged]  # emptied when it is needed, so that nothing here keeps the copy alive

    def take_copy() -> STATE_DICT_TYPE:
        taken = box.pop()
        state = taken.result() if isinstance(taken, Future) else taken
        return in_shared_memory(state) if in_process else state

    return save_in_background(
        BackgroundSave(
            work=functools.partial(_perform_async_save, target=target),
            take_copy=take_copy,
            claim=target.claim(),
            in_process=in_process,
            coordinator_rank=coordinator_rank,
        ),
        lane,
    )


def _choose_stager(given: AsyncStager | None, writer: Any, in_process: bool) -> AsyncStager:
    if given is not None:
        return given
    if isinstance(writer, AsyncStager):
        return writer
    return _SharingStager() if in_process else BlockingAsyncStager()


class _SharingStager(BlockingAsyncStager):
    """Copies into memory that a writer process sees, which spares it another copy."""

    def _pool(self) -> ArenaPool:
        return common_pool(Memory.SHARED)


def _require_cpu_backend(group: dist.ProcessGroup | None) -> None:
    devices = device_types_of(default_group() if group is None else group)
    if torch.device("cpu") not in devices:
        raise AssertionError(
            "A CPU backend must be enabled for async save; the process group has one for "
            f"{', '.join(str(device) for device in devices)} only. Try init_process_group with 'cpu:gloo,cuda:nccl'."
        )


def _without_value(staged: Future[STATE_DICT_TYPE]) -> Future[None]:
    """A future that ends as ``staged`` does, and does not keep the copy alive."""
    ended: ProcessFuture[None] = ProcessFuture("the copy of a state for a background save")
    ended.set_running_or_notify_cancel()

    def pass_on(source: Future[STATE_DICT_TYPE]) -> None:
        error = CancelledError() if source.cancelled() else source.exception()
        ended.set_result(None) if error is None else ended.set_exception(error)

    staged.add_done_callback(pass_on)
    return ended


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
    with _profile():
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
    with drop_in_meeting("holdfast.dcp.save", process_group, alone=no_dist, coordinator_rank=coordinator_rank) as ranks:
        return save_state(
            state_dict,
            storage_writer,
            DefaultSavePlanner() if planner is None else planner,
            ranks,
            use_collectives=use_collectives,
        )


@_dcp_method_logger(log_exceptions=True)
def _stateful_to_state_dict(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """The same dict with the state of every ``Stateful`` in its place. They are asked in the order of the dict."""
    lost = partitioned_in(state_dict)
    if lost:
        raise refused(lost)
    states = {}
    for key, value in state_dict.items():
        with recorded(f"_stateful_to_state_dict.{key}", log_exceptions=True):
            states[key] = _state_of(value)
    return states
