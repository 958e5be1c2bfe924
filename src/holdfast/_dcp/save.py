"""The save flow: plan on every rank, agree, write on every rank, commit.

Nothing here knows tensors, files or formats. The planner says what is written, the writer where; this module says in
which order, and makes sure that all ranks succeed or fail together.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

from holdfast._base.garbage import let_go_in_parts, no_garbage_collection
from holdfast._base.notices import warn_caller
from holdfast._dcp.events import recorded, recorded_step
from holdfast._dcp.index_files import PlacesInIndex
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.shared_plan import OwnCopies
from holdfast._dcp.shared_save import Offer, SharedSave, does_what_ours_do
from holdfast._dcp.storage import StorageWriter, WriteResult
from holdfast._dcp.stored_columns import StoredColumns, planned_places
from holdfast._dcp.writer import _FileSystemWriter
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from holdfast._formats.dcp.plan import SavePlan
from holdfast._layout.part_owners import Settled
from holdfast._ranks.committing import commit_on_each
from holdfast._ranks.shared_steps import Collectives
from holdfast.errors import RankDisagreementError

logger = logging.getLogger(__name__)


def save_state(
    state_dict: STATE_DICT_TYPE,
    writer: StorageWriter,
    planner: SavePlanner,
    ranks: Collectives,
    *,
    use_collectives: bool = True,
) -> Metadata:
    """Save ``state_dict`` with all ranks of ``ranks``; every rank gets the index of the whole checkpoint."""
    started = time.perf_counter()
    save = _Save(state_dict, writer, planner, ranks)
    del state_dict, planner  # the save has them, and decides when they go
    try:
        metadata = save.together() if use_collectives else save.each_for_itself()
    finally:
        save.let_go()
    logger.info("saved %d keys in %.3f s", len(metadata.state_dict_metadata), time.perf_counter() - started)
    return metadata


class Committed(NamedTuple):
    """What the coordinator sends the others in the end, where they know everything else."""

    storage_meta: StorageMeta | None
    version: str | None


class _Save:
    """One save. Its methods are the steps, in the order in which they happen."""

    def __init__(
        self, state_dict: STATE_DICT_TYPE, writer: StorageWriter, planner: SavePlanner, ranks: Collectives
    ) -> None:
        self.state_dict = state_dict
        self.writer = writer
        self.planner = planner
        self.ranks = ranks
        self.destination: str | None = None
        self.metadata: Metadata | None = None
        self.shared: SharedSave | None = None
        """Set where this rank could compute the plan."""
        self.proposed: list[Any] = []
        """What the plans of the ranks consist of, until they are replaced by the common one."""
        self.used: list[Any] = []
        """What will be left over in the end."""
        self.about: dict[str, Any] = {
            "checkpoint_id": getattr(writer, "checkpoint_id", None),
            "process_group": ranks.group,
        }

    def let_go(self) -> None:
        """Forget the state. The traceback of an error leads here, and must not keep it alive."""
        if isinstance(self.metadata, Metadata):
            self.used += self.metadata.state_dict_metadata.values()
        del self.state_dict, self.planner, self.metadata, self.shared
        let_go_in_parts(self.proposed)
        let_go_in_parts(self.used)

    def together(self) -> Metadata:
        """The ranks plan together and commit one index."""
        self.planner.peers = self.ranks.global_ranks()
        plan: SavePlan | None = None
        settled: Settled | None = None
        try:
            agreed = self.ranks.combine("plan", self._offer, Offer.joined)
            if agreed.digest is None:
                plan = self.ranks.reduce_scatter("plan", self._propose, self._plan_for_one_destination)
            elif agreed.copies:
                settled = self.ranks.all_reduce("plan", self._own_copies, self._settle)
        except BaseException:
            call_if_present(self.planner, "forget_cached_plans")
            raise
        try:
            if plan is not None:
                return self.ranks.all_reduce("write", lambda: self._write(plan), self._commit)
            committed = self.ranks.all_reduce("write", lambda: self._write_share(agreed, settled), self._commit_shares)
        except BaseException:
            if self.ranks.is_coordinator:
                call_if_present(self.writer, "discard_unfinished")
            raise
        return self.metadata or self._index_of_shares(committed)

    # Where all ranks know all plans

    @recorded_step("local_step")
    @no_garbage_collection()
    def _offer(self) -> Offer:
        """What this rank has to say before anybody plans."""
        if not does_what_ours_do(self.planner, self.writer):
            return Offer()
        self._set_up(use_collectives=True)
        planner, writer = cast(DefaultSavePlanner, self.planner), cast(_FileSystemWriter, self.writer)
        self.shared = SharedSave(planner, writer, self.ranks.rank, self.destination)
        return self.shared.offer()

    def _own_copies(self) -> OwnCopies:
        assert self.shared is not None
        return self.shared.copies

    def _settle(self, copies: list[OwnCopies]) -> Settled:
        assert self.shared is not None
        return self.shared.settle(copies)

    def _write_share(self, agreed: Offer, settled: Settled | None) -> StoredColumns:
        assert self.shared is not None
        assert agreed.generation is not None
        with recorded("global_step", **self.about) if self.ranks.is_coordinator else nullcontext():
            plan = self.shared.decide(settled, agreed.generation)
        self.used += plan.items
        with recorded("write_data", **self.about):
            return self.shared.write(plan)

    @recorded_step("finish_checkpoint")
    @no_garbage_collection()
    def _commit_shares(self, stored: list[StoredColumns]) -> Committed:
        assert self.shared is not None
        assert self.shared.plan is not None
        metadata = self._describe_shares()
        if self.ranks.world_size == 1:  # with more, nobody has the plans of all ranks
            planner = cast(DefaultSavePlanner, self.planner)
            planner.global_plan, planner.metadata = [planner.plan], metadata
        places = planned_places(self.shared.plan, stored)
        writer = cast(_FileSystemWriter, self.writer)
        writer.finish_shared_plan(metadata, places, [part.hosts() for part in stored])
        self.metadata = metadata
        return Committed(metadata.storage_meta, metadata.version)

    def _describe_shares(self) -> Metadata:
        assert self.shared is not None
        assert self.shared.plan is not None
        planner = cast(DefaultSavePlanner, self.planner)
        paths = dict(planner.mappings) if planner.flatten_state_dict else None
        return Metadata(self.shared.plan.describe(), planner_data=paths)

    def _index_of_shares(self, committed: Committed) -> Metadata:
        """The index on a rank that has not written it. Where things are is read from there if somebody asks."""
        metadata = self._describe_shares()
        metadata.storage_meta, metadata.version = committed
        writer = cast(_FileSystemWriter, self.writer)
        save_id = None if committed.storage_meta is None else committed.storage_meta.save_id
        metadata.leave_places(PlacesInIndex(writer.fs, writer.metadata_path, save_id))
        return metadata

    def each_for_itself(self) -> Metadata:
        """Each rank writes an index of its own part. Rank 0's is put in place first, which commits all of them."""
        self.planner.peers = (self.ranks.rank,)
        self._share_save_id()

        try:
            with self.ranks.step("write"):
                plan = self._plan_globally([self._plan_locally(use_collectives=False)])[0]
                results = self._write(plan)
            with self.ranks.step("write"):
                metadata = self._commit([results])
        except BaseException:
            call_if_present(self.writer, "discard_unfinished")
            raise
        world_size = self.ranks.world_size
        commit_on_each(
            self.ranks,
            "write",
            lambda: call_if_present(self.writer, "commit_rank_local", world_size),
            may_have_happened=lambda: getattr(self.writer, "may_be_committed", True),
            undo=lambda: call_if_present(self.writer, "discard_unfinished"),
        )
        with self.ranks.step("write"):
            call_if_present(self.writer, "finish_rank_local", world_size)
        return metadata

    @recorded_step("local_step")
    @no_garbage_collection()
    def _plan_locally(self, *, use_collectives: bool = True) -> SavePlan:
        if self.shared is None:
            self._set_up(use_collectives=use_collectives)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _set_up(self, *, use_collectives: bool) -> None:
        meta = self.writer.storage_meta()
        self.destination = None if meta is None or meta.checkpoint_id is None else str(meta.checkpoint_id)
        set_up_save_planner(self.planner, self.state_dict, meta, self.ranks.is_coordinator)
        set_up_storage(
            self.writer.set_up_storage_writer,
            self.ranks.is_coordinator,
            rank=self.ranks.rank,
            use_collectives=use_collectives,
        )

    def _propose(self) -> tuple[str | None, SavePlan]:
        plan = self._plan_locally()
        self.proposed += _members(plan)
        return self.destination, plan

    def _plan_for_one_destination(self, proposals: list[tuple[str | None, SavePlan]]) -> list[SavePlan]:
        """Plan for all ranks, which must have been given the same path: one index cannot describe several folders."""
        self.proposed += (member for _, plan in proposals for member in _members(plan))
        paths = {rank: str(path) for rank, (path, _) in enumerate(proposals)}
        if len(set(paths.values())) > 1:
            raise RankDisagreementError(
                f"the ranks save to different paths: {paths}. Give all ranks the same one; a path made from the time "
                "or the rank is different on each.",
                views=paths,
            )
        return self._plan_globally([plan for _, plan in proposals])

    @recorded_step("global_step")
    @no_garbage_collection()
    def _plan_globally(self, local_plans: list[SavePlan]) -> list[SavePlan]:
        plans, self.metadata = self.planner.create_global_plan(local_plans)
        plans = self.writer.prepare_global_plan(plans)
        self.used += (member for plan in plans for member in _members(plan))
        return plans

    @recorded_step("write_data")
    def _write(self, plan: SavePlan) -> list[WriteResult]:
        plan = self.planner.finish_plan(plan)
        self.used += _members(plan)
        let_go_in_parts(self.proposed)
        future = self.writer.write_data(plan, self.planner)
        future.wait()
        return future.value()

    @recorded_step("finish_checkpoint")
    @no_garbage_collection()
    def _commit(self, results: list[list[WriteResult]]) -> Metadata:
        if self.metadata is None:
            raise AssertionError("nothing was planned")
        self.used += (result for part in results for result in part)
        self.writer.finish(metadata=self.metadata, results=results)
        return self.metadata

    def _share_save_id(self) -> None:
        """Give all ranks' parts one id, so that parts of different saves are told apart when they are loaded."""
        save_id = self.ranks.broadcast("plan", lambda: str(uuid.uuid4()))
        call_if_present(self.writer, "share_save", save_id)


def _members(plan: SavePlan) -> Iterator[Any]:
    """What a plan has many of. A custom planner may make plans of a class of its own."""
    yield from plan.items
    yield from getattr(plan, "replica_digests", ())
    planner_data = getattr(plan, "planner_data", None)
    if isinstance(planner_data, dict):
        yield from planner_data.values()


def set_up_save_planner(
    planner: SavePlanner, state_dict: STATE_DICT_TYPE, storage_meta: Any, is_coordinator: bool
) -> None:
    """Set up a planner, also one that was written before planners were given the storage."""
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
        return
    warn_caller(
        f"{type(planner).__name__}.set_up_planner takes no storage_meta; planners should take "
        "(state_dict, storage_meta=None, is_coordinator=False)"
    )
    planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]


def set_up_storage(set_up: Any, *args: Any, **role: Any) -> None:
    """Call a storage's set-up; it is given its role only if it takes ``kwargs``, since older storages do not."""
    takes_role = "kwargs" in inspect.signature(set_up).parameters
    set_up(*args, **(role if takes_role else {}))


def call_if_present(target: object, method: str, *args: Any) -> None:
    """Call a method that our planners and storages have and other people's need not have."""
    function = getattr(target, method, None)
    if callable(function):
        function(*args)
