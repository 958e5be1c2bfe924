"""``holdfast.save``: capture on every rank, agree, write on every rank, commit."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import xxhash

from holdfast.coordination.meeting import meeting
from holdfast.environment import stamp
from holdfast.errors import CheckpointException
from holdfast.formats.native.json_texts import dumps
from holdfast.formats.native.layout import ChunkToWrite
from holdfast.formats.native.names import new_generation
from holdfast.garbage import no_garbage_collection
from holdfast.notices import warn_caller
from holdfast.patterns import Pattern, Patterns
from holdfast.planning.agreement import Differing, agree, describe_differing, refuse_differing
from holdfast.planning.holdings import Holding
from holdfast.planning.merged_trees import fill_slots, merge_trees, refuse_shared_keys, renamed_tensors, tensor_keys
from holdfast.planning.named_rows import NamedRows
from holdfast.save_report import SaveReport
from holdfast.storage.native_files import (
    Before,
    Contents,
    WrittenFile,
    commit_checkpoint,
    is_committed,
    look_before,
    remove_unfinished,
    write_chunks,
)
from holdfast.stores.places import in_messages, store_at
from holdfast.stores.store import Store
from holdfast.verbs.capturing import Capture, Captured
from holdfast.verbs.save_options import SaveOptions

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.coordination.collectives import Collectives

logger = logging.getLogger(__name__)


def save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    cast: Mapping[Pattern, Any] | None = None,
    check_replicas: bool | Literal["warn"] = True,
    allow_pickle: bool = False,
    max_file_size: int | None = None,
    memory_budget: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport:
    """Save a state to a folder. With a process group all its ranks call this together, each with its own part.

    The checkpoint appears at once and whole when everything is durable, or not at all.

    Args:
        state: any nesting of dicts, lists and tuples with tensors, numpy arrays, models, optimizers, other objects
            that have ``state_dict`` and ``load_state_dict``, and plain values. ``PerRank`` and ``RngState`` mark what
            every rank has its own of.
        path: a folder, ``memory://name``, or a store. All ranks give the same.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error.
        metadata: anything that JSON can hold, to be found in the checkpoint by people and programs. That of the first
            rank counts.
        include: which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions.
        exclude: which of these not to save.
        cast: patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``.
        check_replicas: compare what several ranks hold before one copy is stored. ``"warn"`` stores the copy of the
            lowest rank where they differ, False takes all copies to be equal.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: bytes of data in one file at most. Larger tensors are cut.
        memory_budget: bytes that may be allocated beyond the state, apart from some 2 KB per tensor. 64 MiB by default,
            256 KiB at least.
        process_group: the ranks that save. All by default; this process alone if there is no process group.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> saved.tensor_count
        2
        >>> hf.open(path)["step"]
        100
    """
    started = time.perf_counter()
    call = f"holdfast.save to {in_messages(path)}, overwrite={overwrite!r}, check_replicas={check_replicas!r}"
    with meeting(call, process_group) as ranks:

        def capture() -> tuple[_Save, Captured]:
            options = SaveOptions.of(
                include=include,
                exclude=exclude,
                cast=cast,
                metadata=metadata,
                overwrite=overwrite,
                check_replicas=check_replicas,
                allow_pickle=allow_pickle,
                max_file_size=max_file_size,
                memory_budget=memory_budget,
            )
            run = _Save(store_at(path), ranks, options, started)
            return run, Capture.of(options, ranks.rank, ranks.world_size).take(state)

        with no_garbage_collection():
            run, captured = ranks.all_gather_status("capture", capture)
            plan = run.plan(captured)
        files = run.write(plan, captured)
        report = run.commit(plan, files)
    logger.info(
        "saved %d tensors, %d bytes to %s in %.2f s",
        report.tensor_count,
        report.bytes_written,
        report.path,
        report.seconds,
    )
    return report


@dataclass(frozen=True)
class _Plan:
    """What is to be done."""

    generation: str
    chunks: Sequence[ChunkToWrite]
    """That this rank writes."""
    decision: _Decision | None
    """Only the coordinator has it."""


@dataclass(frozen=True)
class _Decision:
    """What the checkpoint will contain, and what was there before."""

    before: Before
    contents: Contents


@dataclass(frozen=True)
class _Save:
    """One save. Its methods are the steps, in the order in which they happen."""

    store: Store
    ranks: Collectives
    options: SaveOptions
    started: float

    def plan(self, captured: Captured) -> _Plan:
        """Find out together what the checkpoint contains, and who writes what of it."""
        same_tree_as, holdings = self._first_with_the_same_tree(captured), NamedRows(captured.holdings)
        proposal = _Proposal(same_tree_as, captured.tree, captured.own, holdings)
        if proposal.same_tree_as != self.ranks.rank:
            proposal = proposal._replace(tree=None)  # it need not be sent twice
        decision: _Decision | None = None

        def decide(proposals: list[_Proposal]) -> list[tuple[str, Sequence[ChunkToWrite]]]:
            nonlocal decision
            decision, chunks = self._decide(proposals)
            generation = new_generation()
            return [(generation, NamedRows(part)) for part in chunks]

        generation, chunks = self.ranks.reduce_scatter("plan", lambda: proposal, decide)
        return _Plan(generation, chunks, decision)

    def write(self, plan: _Plan, captured: Captured) -> list[WrittenFile]:
        """Write this rank's part. If another rank fails, it is removed again."""
        written: list[WrittenFile] = []

        def write() -> None:
            written.extend(
                write_chunks(
                    self.store,
                    plan.chunks,
                    captured.local,
                    generation=plan.generation,
                    rank=self.ranks.rank,
                    max_file_size=self.options.max_file_size,
                    memory_budget=self.options.memory_budget,
                )
            )

        try:
            self.ranks.all_gather_status("write", write)
        except BaseException:
            remove_unfinished(self.store, [file.name for file in written])
            raise
        return written

    def commit(self, plan: _Plan, files: list[WrittenFile]) -> SaveReport:
        """The coordinator puts the record in place, which makes all files of all ranks a checkpoint."""

        def put_in_place(parts: list[tuple[list[WrittenFile], float]]) -> SaveReport:
            assert plan.decision is not None
            began = time.perf_counter()
            every = [file for part, _ in parts for file in part]
            with no_garbage_collection():
                record = commit_checkpoint(
                    self.store, plan.decision.before, every, plan.decision.contents, plan.generation
                )
            return SaveReport(
                path=self.store.location,
                identity=plan.generation,
                tensor_count=len(record.tensors),
                bytes_written=sum(file.nbytes for file in record.files),
                seconds=max(seconds for _, seconds in parts) + time.perf_counter() - began,
                world_size=self.ranks.world_size,
            )

        try:
            return self.ranks.all_reduce("commit", lambda: (files, time.perf_counter() - self.started), put_in_place)
        except BaseException as error:
            # Without the coordinator's word it may be about to commit, and then it needs our files.
            coordinator_is_done = self.ranks.is_coordinator or isinstance(error, CheckpointException)
            if coordinator_is_done and not is_committed(self.store, plan.generation):
                remove_unfinished(self.store, [file.name for file in files])
            raise

    def _first_with_the_same_tree(self, captured: Captured) -> int:
        """The lowest rank whose tree is the same as this rank's."""
        if self.ranks.world_size == 1:
            return 0
        digest = xxhash.xxh3_128_digest(dumps(captured.tree).encode())
        return self.ranks.all_gather_object(digest).index(digest)

    def _decide(self, proposals: list[_Proposal]) -> tuple[_Decision, Sequence[Sequence[ChunkToWrite]]]:
        """One checkpoint out of what all ranks propose, and the chunks that each of them writes."""
        before = look_before(self.store, overwrite=self.options.overwrite)
        tree, differing = merge_trees([proposals[proposal.same_tree_as].tree for proposal in proposals])
        tree = _with_own(tree, [proposal.own for proposal in proposals])
        self._refuse_empty_selection(tree)
        holdings: list[Sequence[Holding]] = [proposal.holdings for proposal in proposals]
        if differing:
            # Where not even the structure is the same, some rank's tensors have no place in the checkpoint.
            referred = set(tensor_keys(tree))
            holdings = [[holding for holding in part if holding.key in referred] for part in holdings]
        agreed = agree(holdings)
        self._treat_differences([*differing, *agreed.differing])
        if agreed.ties:
            tree = renamed_tensors(tree, agreed.ties)
        contents = Contents(agreed.tensors, tree, self.options.metadata, stamp(self.ranks.world_size))
        return _Decision(before, contents), agreed.chunks

    def _refuse_empty_selection(self, tree: Any) -> None:
        if tree == {} and not self.options.selection.is_everything:
            raise ValueError(
                "include and exclude leave nothing of the state, so nothing was saved. Texts take wildcards "
                '("model", "*.bias"); regular expressions have to match whole keys.'
            )

    def _treat_differences(self, differing: list[Differing]) -> None:
        if self.options.check_replicas is True:
            refuse_differing(differing)
        elif self.options.check_replicas == "warn" and differing:
            warn_caller(describe_differing(differing, "The copies of the lowest ranks are saved, the others are lost."))


class _Proposal(NamedTuple):
    """What a rank would have in the checkpoint."""

    same_tree_as: int
    """The rank that sends the tree."""
    tree: Any
    own: Mapping[str, Any]
    holdings: NamedRows[Holding]


def _with_own(tree: Any, own: Sequence[Mapping[str, Any]]) -> Any:
    """The tree with the values that each rank has of its own."""
    names = {name for values in own for name in values}
    if names:
        tree = fill_slots(tree, {name: [values.get(name) for values in own] for name in names})
    if names or len(own) > 1:
        refuse_shared_keys(tree)
    return tree
