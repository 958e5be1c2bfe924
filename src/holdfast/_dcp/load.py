"""The load flow: read the index on every rank, agree on it, plan, read.

Nothing of the state changes before every rank has a plan that covers all that its state asks for.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import xxhash

from holdfast._background.copy_jobs import finish_copies
from holdfast._base.garbage import no_garbage_collection
from holdfast._dcp.events import recorded, recorded_step
from holdfast._dcp.index_files import shared_save_id
from holdfast._dcp.load_planner import DefaultLoadPlanner
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.reader import FileSystemReader
from holdfast._dcp.save import call_if_present, set_up_storage
from holdfast._dcp.shared_index import SharedIndex, in_columns
from holdfast._dcp.storage import StorageReader
from holdfast._dcp.unchanged import is_unchanged, methods_of
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from holdfast._formats.dcp.plan import LoadPlan
from holdfast._ranks.shared_steps import Collectives
from holdfast.errors import CheckpointNotFoundError, HoldfastError, RankDisagreementError, StateMismatchError

logger = logging.getLogger(__name__)


def load_state(state_dict: STATE_DICT_TYPE, reader: StorageReader, planner: LoadPlanner, ranks: Collectives) -> None:
    """Load into ``state_dict`` with all ranks of ``ranks``."""
    started = time.perf_counter()
    finish_copies()  # of what is going to be overwritten
    _Load(state_dict, reader, planner, ranks).run()
    logger.info("loaded in %.3f s", time.perf_counter() - started)


class _View(NamedTuple):
    """Which checkpoint a rank looks at. All ranks must look at the same."""

    saved_rank_by_rank: bool
    save_id: str | None

    def __str__(self) -> str:
        kind = "indexes of single ranks" if self.saved_rank_by_rank else "an index of all ranks"
        return f"{kind}, save {self.save_id}"


class _Glance(NamedTuple):
    """What a rank sees at first sight; of several ranks together, what they agree on."""

    digest: bytes | None
    """Of the bytes of the index; None if it is read in another way."""
    plans_alone: bool

    @staticmethod
    def joined(glances: Sequence[_Glance]) -> _Glance:
        digests = {glance.digest for glance in glances}
        return _Glance(digests.pop() if len(digests) == 1 else None, all(glance.plans_alone for glance in glances))


def reads_index_as_ours(reader: object) -> bool:
    """Whether a reader gets its index out of one file, in the way that ours does."""
    return is_unchanged(reader, FileSystemReader, _READING_INDEX)


def plans_need_not_travel(planner: object, reader: object) -> bool:
    """Whether every rank gets back the very plan that it has made."""
    return is_unchanged(planner, DefaultLoadPlanner, _PLANNING) and is_unchanged(reader, FileSystemReader, _PREPARING)


_READING_INDEX = methods_of(
    FileSystemReader, "read_metadata", "_indexes", "_get_metadata_path", "set_up_storage_reader"
)
_PLANNING = methods_of(DefaultLoadPlanner, "create_global_plan")
_PREPARING = methods_of(FileSystemReader, "prepare_global_plan")


class _Load:
    """One load. Its methods are the steps, in the order in which they happen."""

    def __init__(
        self, state_dict: STATE_DICT_TYPE, reader: StorageReader, planner: LoadPlanner, ranks: Collectives
    ) -> None:
        self.state_dict = state_dict
        self.reader = reader
        self.planner = planner
        self.ranks = ranks
        self.saved_rank_by_rank = False
        self.plans_alone = False
        """Whether all ranks carry out the plans that they make for themselves."""
        self.index_bytes = b""
        self.about: dict[str, Any] = {
            "checkpoint_id": getattr(reader, "checkpoint_id", None),
            "process_group": ranks.group,
        }

    def run(self) -> None:
        """All steps."""
        call_if_present(self.reader, "meet_ranks", self.ranks)
        with no_garbage_collection():
            metadata = self._agree_on_index()
            try:
                plan = self._plan(metadata)
            except BaseException:
                call_if_present(self.planner, "undo_set_up")
                raise
        if getattr(self.reader, "reads_together", False):
            # Its ranks wait for each other while they read, so none of them may fail before that.
            with self.ranks.step("read"):
                finished = self.planner.finish_plan(plan)
            with recorded("read_data", **self.about):
                self.reader.read_data(finished, self.planner).wait()
        else:
            with self.ranks.step("read"):
                self._read(plan)

    def _agree_on_index(self) -> Metadata:
        """Read the index. Ranks that see different checkpoints (a stale mount, a save going on) must not go on."""
        if self.ranks.world_size > 1:
            seen = self.ranks.combine("plan", self._glance, _Glance.joined)
            self.plans_alone = seen.plans_alone
            if seen.digest is not None:
                return self._index_of_one()
        found: list[Metadata] = []

        def look() -> _View:
            found.append(self._read_index())
            return self._view_of(found[-1])

        def look_again() -> _View:
            """A part of another save than rank 0's is left over from more ranks; this rank has no part of its own."""
            if views[self.ranks.rank] != views[0]:
                found.append(self._merged_index() or found[-1])
            return self._view_of(found[-1])

        views = self.ranks.all_gather("plan", look)
        if _differ(views) and all(view.saved_rank_by_rank for view in views):
            views = self.ranks.all_gather("plan", look_again)
        if _differ(views):
            with self.ranks.step("plan"):
                _refuse_different_views(views)
        return found[-1]

    def _glance(self) -> _Glance:
        """Look at the index without reading it, so that only one rank needs to."""
        alone = plans_need_not_travel(self.planner, self.reader)
        if not reads_index_as_ours(self.reader):
            return _Glance(None, alone)
        try:
            self.index_bytes = cast(FileSystemReader, self.reader).index_bytes()
        except Exception:  # whoever reads the index says what is wrong with it
            return _Glance(None, alone)
        return _Glance(xxhash.xxh3_128(self.index_bytes).digest(), alone)

    def _index_of_one(self) -> Metadata:
        """The index, which the coordinator has read for all."""
        reader = cast(FileSystemReader, self.reader)
        own: list[Metadata] = []

        def read() -> SharedIndex | None:
            own.append(reader.index_of(self.index_bytes))
            return in_columns(own[-1])

        shared = self.ranks.broadcast("plan", read)
        if shared is None and not own:
            with self.ranks.step("plan"):
                own.append(reader.index_of(self.index_bytes))
        elif shared is None:
            with self.ranks.step("plan"):
                pass
        self.index_bytes = b""
        if own:
            return own[-1]
        assert shared is not None
        metadata = shared.metadata()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = reader.load_id
        return metadata

    def _view_of(self, metadata: Metadata) -> _View:
        if self.saved_rank_by_rank:
            return _View(True, shared_save_id(metadata))
        return _View(False, metadata.storage_meta.save_id if metadata.storage_meta else None)

    def _read_index(self) -> Metadata:
        try:
            return self.reader.read_metadata()
        except Exception as whole_failed:
            takes_rank = "kwargs" in inspect.signature(self.reader.read_metadata).parameters
            if _is_there(whole_failed) or not takes_rank:
                raise
            try:
                own = self.reader.read_metadata(rank=self.ranks.rank)
            except Exception as own_failed:
                if _is_there(own_failed):
                    raise
                merged = self._merged_index() if isinstance(own_failed, FileNotFoundError) else None
                if merged is None:
                    raise whole_failed from None
                own = merged
        self.saved_rank_by_rank = True
        return own

    def _merged_index(self) -> Metadata | None:
        """The index of all ranks' parts together, if the reader can make one."""
        merge: Any = getattr(self.reader, "read_merged_rank_metadata", None)
        if merge is None:
            return None
        try:
            merged: Metadata = merge(self.ranks.rank)
        except CheckpointNotFoundError:
            return None
        return merged

    def _plan(self, metadata: Metadata) -> LoadPlan:
        if self.saved_rank_by_rank:
            with self.ranks.step("plan"):
                return self._plan_own_part(metadata)
        if self.plans_alone:
            with self.ranks.step("plan"):
                plan = self._plan_locally(metadata)
                return self._plan_globally([plan])[0] if self.ranks.is_coordinator else plan
        return self.ranks.reduce_scatter("plan", lambda: self._plan_locally(metadata), self._plan_globally)

    def _plan_own_part(self, metadata: Metadata) -> LoadPlan:
        """Plan with this rank's own part of the checkpoint; with all parts if that is not enough."""
        if getattr(self.planner, "takes_what_is_there", False):
            metadata = self._merged_index() or metadata
        try:
            plan = self._plan_locally(metadata)
        except StateMismatchError as error:
            merge: Any = getattr(self.reader, "read_merged_rank_metadata", None)
            if merge is None or not (error.missing or error.uncovered):
                raise
            call_if_present(self.planner, "undo_set_up")
            plan = self._plan_locally(merge(self.ranks.rank))
        return self._plan_globally([plan])[0]

    @recorded_step("local_step")
    def _plan_locally(self, metadata: Metadata) -> LoadPlan:
        self.planner.set_up_planner(self.state_dict, metadata, self.ranks.is_coordinator)
        set_up_storage(
            self.reader.set_up_storage_reader,
            metadata,
            self.ranks.is_coordinator,
            rank=self.ranks.rank,
            use_collectives=not self.saved_rank_by_rank,
        )
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    @recorded_step("global_step")
    def _plan_globally(self, local_plans: list[LoadPlan]) -> list[LoadPlan]:
        return self.reader.prepare_global_plan(self.planner.create_global_plan(local_plans))

    @recorded_step("read_data")
    def _read(self, plan: LoadPlan) -> None:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()


def _is_there(error: Exception) -> bool:
    """Whether there is an index and it cannot be read. It must not be replaced by whatever else is there."""
    return isinstance(error, (HoldfastError, OSError)) and not isinstance(error, FileNotFoundError)


def _differ(views: list[_View]) -> bool:
    """Whether these are views of different checkpoints. Unknown for parts whose writer gave no common id."""
    by_rank = views[0].saved_rank_by_rank
    ids = {view.save_id for view in views if view.save_id is not None or not by_rank}
    return any(view.saved_rank_by_rank != by_rank for view in views) or len(ids) > 1


def _refuse_different_views(views: list[_View]) -> None:
    seen = {rank: str(view) for rank, view in enumerate(views)}
    raise RankDisagreementError(
        f"the ranks look at different checkpoints: {seen}. Wait until a running save has finished and all ranks see "
        "the same files, then load again.",
        views=seen,
    )
