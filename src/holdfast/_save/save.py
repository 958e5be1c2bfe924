"""``holdfast.save``: capture on every rank, agree, write on every rank, commit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from holdfast._background.futures import warn_of_unseen_failures
from holdfast._background.queues import Claim, wait_for_conflicting_saves
from holdfast._base.commits import Commit
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.json_parts import dumps
from holdfast._base.notices import warn_caller
from holdfast._base.provenance import noted_optimizers, stamp
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.names import new_generation
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import parts_of_shares
from holdfast._formats.native.writing import (
    CheckpointContents,
    Existing,
    commit_checkpoint,
    inspect_destination,
    remove_unfinished,
    write_chunks,
)
from holdfast._layout.descriptions import TensorDescription
from holdfast._ranks.committing import commit_for_all
from holdfast._ranks.differences import Differing, describe_differing, refuse_differing
from holdfast._ranks.meeting import meeting, own_place
from holdfast._save.agreement import agree
from holdfast._save.capture import Capture, Captured
from holdfast._save.local_bytes import bytes_of
from holdfast._save.merged_trees import fill_slots, merge_trees, refuse_shared_keys, renamed_tensors, tensor_keys
from holdfast._save.options import CheckedOptions, SaveOptions, refuse_unknown_options, shows_save_options
from holdfast._save.report import SaveReport
from holdfast._stores.places import in_messages, store_at
from holdfast._stores.store import Store
from holdfast._watching.calls import Call, by_phase, noted_phases

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

    from holdfast._ranks.shared_steps import Collectives


@shows_save_options
def save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a state to a folder. With a process group all its ranks call this together, each with its own part.

    The checkpoint appears at once and complete when everything is durable, or not at all.

    Args:
        state: any nesting of dicts, lists and tuples with tensors, numpy arrays, models, optimizers, other objects
            that have ``state_dict`` and ``load_state_dict``, and plain values. ``PerRank`` and ``RngState`` mark
            per-rank state.
        path: a folder, a URL such as ``s3://bucket/name``, or a store. All ranks give the same.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error.
        metadata: anything that JSON can hold, to be found in the checkpoint by people and programs. That of the first
            rank counts.
        include: which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions.
        exclude: which of these not to save.
        cast: patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``.
        replica_mismatch: what several ranks hold is compared before one copy is stored. If copies differ, that is an
            ``"error"``; ``"warn"`` stores the copy of the lowest rank, and ``"ignore"`` compares nothing.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: the most bytes of data in one file, as a number or such as ``"5GB"``. Larger tensors are cut.
        memory_budget: how much may be allocated beyond the state, apart from some 2 KB per tensor, such as
            ``"256MB"``: 64 MiB by default, 256 KiB at least.
        process_group: the ranks that save. All by default; this process alone if there is no process group.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> saved.tensor_count
        2
        >>> holdfast.open(path)["step"]
        100
    """
    refuse_unknown_options("holdfast.save()", options)
    make_options = functools.partial(CheckedOptions.of, options, overwrite=overwrite)
    place = in_messages(path)
    warn_of_unseen_failures()
    wait_for_conflicting_saves(Claim(place))
    on_mismatch = options.get("replica_mismatch", "error")
    call = f"holdfast.save to {place}, overwrite={overwrite!r}, replica_mismatch={on_mismatch!r}"
    rank, world_size = own_place(process_group)
    with Call("save", place, rank=rank, world_size=world_size) as event, meeting(call, process_group) as ranks:
        return save_together(ranks, state, path, make_options, event)


def save_together(
    ranks: Collectives,
    state: Any,
    path: str | os.PathLike[str] | Store,
    make_options: Callable[[], CheckedOptions],
    call: Call,
) -> SaveReport:
    """Save with ranks that are together already, and publish its events."""
    call.start_over()
    with ranks.step("capture"), call.phase("capture"), no_garbage_collection():
        options = make_options()
        run = SaveRun(store_at(path), ranks, options, call)
        captured = Capture.of(options, ranks.rank, ranks.world_size).take(state)
    report = run.save(captured)
    call.nbytes, call.slowest_rank = report.bytes_written, report.slowest_rank
    return report


@dataclass(frozen=True)
class SaveRun:
    """One save. Its methods are the steps, in the order in which they happen."""

    store: Store
    ranks: Collectives
    options: CheckedOptions
    call: Call

    def save(self, captured: Captured) -> SaveReport:
        """All steps."""
        with self.call.phase("plan"), no_garbage_collection():
            plan = self.plan(captured)
        files = self.write(plan, captured)
        self.call.enter("commit")  # which the coordinator does, and the others wait for
        return self.commit(plan, files)

    def plan(self, captured: Captured) -> _Plan:
        """Find out together what the checkpoint contains, and who writes what of it."""
        same_tree_as = self._first_with_the_same_tree(captured)
        proposal = _Proposal(same_tree_as, captured.tree, captured.own, captured.descriptions, captured.kinds)
        if proposal.same_tree_as != self.ranks.rank:
            proposal = proposal._replace(tree=None)  # it need not be sent twice
        decisions: list[_Decision] = []  # the coordinator keeps its own; the others need not know it

        def decide(proposals: list[_Proposal]) -> list[tuple[str, Sequence[ChunkToWrite], int]]:
            decision, chunks = self._decide(proposals)
            decisions.append(decision)
            generation, writers = new_generation(), sum(map(bool, chunks))
            return [(generation, part, writers) for part in chunks]

        generation, chunks, writers = self.ranks.reduce_scatter("plan", lambda: proposal, decide)
        return _Plan(generation, chunks, writers, decisions[0] if decisions else None)

    def write(self, plan: _Plan, captured: Captured) -> list[StoredFile]:
        """Write this rank's part. If another rank fails, it is removed again."""
        files: list[StoredFile] = []
        try:
            # The phase is inside of the step: it has not the time in which this rank waits for others.
            with self.ranks.step("write"), self.call.phase("write") as writing:
                files = write_chunks(
                    self.store,
                    plan.chunks,
                    bytes_of(captured.local, self.options.memory_budget),
                    generation=plan.generation,
                    rank=self.ranks.rank,
                    max_file_size=self.options.max_file_size,
                    memory_budget=self.options.memory_budget,
                    writers=plan.writers,
                    advance=self.call.advance,
                )
                writing.nbytes = sum(file.nbytes for file in files)
        except BaseException:
            remove_unfinished(self.store, [file.name for file in files])
            raise
        return files

    def commit(self, plan: _Plan, files: list[StoredFile]) -> SaveReport:
        """The coordinator puts the record in place, which makes all files of all ranks a checkpoint."""

        def put_in_place(parts: list[tuple[list[StoredFile], dict[str, float], float]], commit: Commit) -> SaveReport:
            assert plan.decision is not None
            every = [file for part, _, _ in parts for file in part]
            seconds = [seconds for _, seconds, _ in parts]
            contents = plan.decision.contents
            contents = replace(contents, written={**contents.written, "phases": noted_phases(seconds)})
            with self.call.phase("commit"), no_garbage_collection():
                record = commit_checkpoint(
                    self.store, plan.decision.existing, every, contents, plan.generation, commit=commit
                )
            return SaveReport(
                path=self.store.location,
                identity=plan.generation,
                tensor_count=len(record.tensors),
                bytes_written=sum(file.nbytes for file in record.files),
                seconds=max(elapsed for _, _, elapsed in parts) + self.call.seconds["commit"],
                world_size=self.ranks.world_size,
                phases={**by_phase(seconds), "commit": [self.call.seconds["commit"]]},
            )

        return commit_for_all(
            self.ranks,
            "commit",
            lambda: (files, self.call.seconds, self.call.elapsed()),
            put_in_place,
            undo=lambda: remove_unfinished(self.store, [file.name for file in files]),
        )

    def _first_with_the_same_tree(self, captured: Captured) -> int:
        """The lowest rank whose tree is the same as this rank's."""
        if self.ranks.world_size == 1:
            return 0
        digest = xxhash.xxh3_128_digest(dumps(captured.tree).encode())
        return self.ranks.all_gather_object(digest).index(digest)

    def _decide(self, proposals: list[_Proposal]) -> tuple[_Decision, Sequence[Sequence[ChunkToWrite]]]:
        """One checkpoint out of what all ranks propose, and the chunks that each of them writes."""
        existing = inspect_destination(self.store, overwrite=self.options.overwrite)
        tree, differing = merge_trees([proposals[proposal.same_tree_as].tree for proposal in proposals])
        tree = _with_own(tree, [proposal.own for proposal in proposals])
        self._refuse_empty_selection(tree)
        descriptions: list[Sequence[TensorDescription]] = [proposal.descriptions for proposal in proposals]
        if differing:
            # Where not even the structure is the same, some rank's tensors have no place in the checkpoint.
            referred = set(tensor_keys(tree))
            descriptions = [
                [description for description in part if description.key in referred] for part in descriptions
            ]
        agreed = agree(descriptions)
        self._treat_differences([*differing, *agreed.differing])
        if agreed.ties:
            tree = renamed_tensors(tree, agreed.ties)
        written = stamp(self.ranks.world_size) | noted_optimizers([proposal.kinds for proposal in proposals])
        contents = CheckpointContents(
            agreed.tensors,
            tree,
            self.options.metadata,
            written,
            parts_of_shares(agreed.tensors, agreed.chunks),
            self.ranks.world_size,
        )
        return _Decision(existing, contents), agreed.chunks

    def _refuse_empty_selection(self, tree: Any) -> None:
        if tree == {} and not self.options.is_everything:
            raise ValueError(
                "include and exclude leave nothing of the state, so nothing was saved. Strings may have wildcards "
                '("model", "*.bias"); regular expressions have to match whole keys.'
            )

    def _treat_differences(self, differing: list[Differing]) -> None:
        if self.options.replica_mismatch == "error":
            refuse_differing(differing, _ADVICE)
        elif self.options.replica_mismatch == "warn" and differing:
            outcome = "The copies of the lowest ranks are saved, the others are lost."
            warn_caller(describe_differing(differing, f"{outcome} {_ADVICE}"))


@dataclass(frozen=True)
class _Plan:
    """What is to be done."""

    generation: str
    chunks: Sequence[ChunkToWrite]
    """That this rank writes."""
    writers: int
    """How many ranks write something."""
    decision: _Decision | None
    """Only the coordinator has it."""


@dataclass(frozen=True)
class _Decision:
    """What the checkpoint will contain, and what was there before."""

    existing: Existing
    contents: CheckpointContents


_ADVICE = (
    "If every rank's value matters (a data position, a random state), wrap it in holdfast.PerRank(value). If not, make "
    "the copies equal first, or say replica_mismatch='warn' to store those of the lowest rank."
)
"""On copies that differ."""


class _Proposal(NamedTuple):
    """What a rank would have in the checkpoint."""

    same_tree_as: int
    """The rank that sends the tree."""
    tree: Any
    own: Mapping[str, Any]
    descriptions: Sequence[TensorDescription]
    kinds: Mapping[str, str]
    """The classes of its optimizers, by their keys."""


def _with_own(tree: Any, own: Sequence[Mapping[str, Any]]) -> Any:
    """The tree with the values that each rank has of its own."""
    names = {name for values in own for name in values}
    if names:
        tree = fill_slots(tree, {name: [values.get(name) for values in own] for name in names})
    if names or len(own) > 1:
        refuse_shared_keys(tree)
    return tree
