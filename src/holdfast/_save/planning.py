"""What a checkpoint will contain and who writes it: computed by every rank if all have the same, else agreed upon.

The ranks first exchange a few bytes each (``common_ground``). If these show that all of them have the same tree and the
same tensors, divided by rules, every rank computes what it writes, and nothing else travels. Else every rank sends what
it has to the coordinator, which decides: where ranks have different parts of a state, where tensors are divided in some
way of their own, and where copies differ, to say whose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from holdfast._base.json_parts import dumps
from holdfast._base.notices import warn_caller
from holdfast._base.provenance import noted_optimizers, stamp
from holdfast._formats.native.layout import Chunks, ChunkToWrite
from holdfast._formats.native.names import new_generation
from holdfast._formats.native.refs import TensorRef, TensorRefs
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, parts_of_shares
from holdfast._formats.native.writing import CheckpointContents, Existing, inspect_destination
from holdfast._layout.descriptions import TensorDescription
from holdfast._layout.many_descriptions import Descriptions
from holdfast._ranks.differences import Differing, describe_differing, refuse_differing
from holdfast._save.agreement import agree, ref_of, ties_of_one
from holdfast._save.capture import Captured
from holdfast._save.common_ground import Ballot, digest_of_layout, digest_of_tree, joined, sum_of_copies
from holdfast._save.merged_trees import fill_slots, merge_trees, refuse_shared_keys, renamed_tensors, tensor_keys
from holdfast._save.options import CheckedOptions
from holdfast._save.shared_plan import SharedPlan, has_a_rule, share_out
from holdfast._stores.store import Store

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives


class OwnPart(NamedTuple):
    """What a rank alone has, which the coordinator hears of when all is written."""

    values: Mapping[str, Any]
    """The typed values for the slots of the tree, by name."""
    tensors: Sequence[TensorRef]
    ties: Mapping[str, str]
    """Keys that are other names of tensors."""


_NOTHING = OwnPart({}, (), {})


@dataclass(frozen=True)
class AgreedSave:
    """What the checkpoint will contain, and what was there before."""

    existing: Existing
    agreed: CheckpointContents
    """Without what each rank has of its own, if that is still to come."""
    shared: SharedPlan | None = None
    """Who writes what of the tensors, if a rule says so for all of them."""

    def contents(self, own: Sequence[OwnPart]) -> CheckpointContents:
        """With what each rank has of its own."""
        if self.shared is None:
            return self.agreed
        ties = dict(self.shared.ties)
        for part in own:
            ties.update(part.ties)
        tree = self.agreed.tree
        if any(part.values for part in own):
            tree = _with_own(tree, [part.values for part in own])
        own_tensors = TensorRefs.of([ref for part in own for ref in part.tensors])
        own_parts = [PartsByRule(WHOLE, rank) for rank, part in enumerate(own) for _ in part.tensors]
        return replace(
            self.agreed,
            tensors=TensorRefs.of(self.agreed.tensors).followed_by(own_tensors),
            parts=[*self.agreed.parts, *own_parts],
            tree=renamed_tensors(tree, ties) if ties else tree,
        )


@dataclass(frozen=True)
class WritePlan:
    """What is to be done by this rank."""

    generation: str
    chunks: Sequence[ChunkToWrite]
    """That this rank writes."""
    writers: int
    """How many ranks write something."""
    decision: AgreedSave | None
    """Only the coordinator has it."""
    own: OwnPart = _NOTHING


def plan_save(store: Store, ranks: Collectives, options: CheckedOptions, captured: Captured) -> WritePlan:
    """Find out together what the checkpoint contains, and who writes what of it."""
    return _Planning(store, ranks, options, captured).plan()


@dataclass(frozen=True)
class _Planning:
    """One save, seen from one rank."""

    store: Store
    ranks: Collectives
    options: CheckedOptions
    captured: Captured

    def plan(self) -> WritePlan:
        common, own, own_chunks = self._parts()
        layout = _Layout(b"", self.ranks.rank, self.ranks.world_size, self._may_cut, common)
        if self.ranks.world_size > 1:
            layout = replace(layout, digest=digest_of_layout(common, self._options))
        existing: list[Existing] = []  # which the coordinator looks at, and the others need not know

        def vote() -> Ballot:
            if self.ranks.is_coordinator:
                existing.append(inspect_destination(self.store, overwrite=self.options.overwrite))
            generation = new_generation() if self.ranks.is_coordinator else ""
            return self._ballot(layout, own)._replace(generation=generation)

        outcome = self.ranks.combine("plan", vote, joined)
        if not outcome.is_unanimous:
            return self._gathered(outcome.generation, existing)
        shared = layout.shared_out() if self.ranks.world_size == 1 else known_plan(layout)
        # After those of all come those of each rank, of which all have as many.
        number = len(shared.tensors) + self.ranks.rank * outcome.own_tensors
        own_chunks = [chunk._replace(tensor=number + chunk.tensor) for chunk in own_chunks]
        chunks = shared.chunks.followed_by(Chunks.of(own_chunks))
        decision = self._decided(shared, existing[0]) if existing else None
        writers = self.ranks.world_size if outcome.own_tensors else shared.writers
        return WritePlan(outcome.generation, chunks, writers, decision, own)

    @property
    def _descriptions(self) -> Descriptions:
        return Descriptions.of(self.captured.descriptions)

    @property
    def _may_cut(self) -> bool:
        """Copies that nobody compares may differ, and must not be mixed in one tensor."""
        return self.options.replica_mismatch != "ignore"

    @property
    def _options(self) -> tuple[Any, ...]:
        """Those that must be the same on all ranks."""
        return self.options.replica_mismatch, self.options.overwrite, self.options.max_file_size

    def _parts(self) -> tuple[Descriptions, OwnPart, list[ChunkToWrite]]:
        """What all ranks should have alike, what this one has of its own, and that as chunks."""
        every = self._descriptions
        if not self.captured.own:
            return every, _NOTHING, []
        is_own = np.array(every.each([like.rank is not None for like in every.likes]), np.bool_)
        common, of_rank = every.chosen(np.flatnonzero(~is_own)), every.chosen(np.flatnonzero(is_own))
        ties = ties_of_one(of_rank)
        kept = [described for described in of_rank if described.key not in ties]
        refs = [ref_of(described) for described in kept]
        chunks = [
            ChunkToWrite(number, ref.key, ref.dtype, ref.shape, offsets, sizes)
            for number, (ref, described) in enumerate(zip(refs, kept, strict=True))
            for offsets, sizes in described.boxes
        ]
        return common, OwnPart(self.captured.own, refs, ties), chunks

    def _ballot(self, layout: _Layout, own: OwnPart) -> Ballot:
        agree = all(map(has_a_rule, self._descriptions.likes)) and not self._is_empty(self.captured.tree)
        if self.ranks.world_size == 1:
            return Ballot(b"", agree, len(own.tensors))
        digest = layout.digest + digest_of_tree(self.captured.tree, self.captured.kinds)
        copies = sum_of_copies(layout.descriptions, layout.rank, layout.world_size) if agree else 0
        return Ballot(digest, agree, len(own.tensors), copies)

    def _decided(self, shared: SharedPlan, existing: Existing) -> AgreedSave:
        contents = self._contents(shared.tensors, shared.parts, self.captured.tree, [self.captured.kinds])
        return AgreedSave(existing, contents, shared)

    def _contents(
        self,
        tensors: Sequence[TensorRef],
        parts: Sequence[StoredParts],
        tree: Any,
        kinds: Sequence[Mapping[str, str]],
    ) -> CheckpointContents:
        written = stamp(self.ranks.world_size) | noted_optimizers(kinds)
        return CheckpointContents(tensors, tree, self.options.metadata, written, parts, self.ranks.world_size)

    def _is_empty(self, tree: Any) -> bool:
        return tree == {} and not self.options.is_everything

    # Where ranks have different things: all send what they have, and the coordinator decides.

    def _gathered(self, generation: str, existing: Sequence[Existing]) -> WritePlan:
        captured = self.captured
        same_tree_as = self._first_with_the_same_tree()
        tree = captured.tree if same_tree_as == self.ranks.rank else None  # it need not be sent twice
        proposal = _Proposal(same_tree_as, tree, captured.own, captured.descriptions, captured.kinds)
        decisions: list[AgreedSave] = []  # the coordinator keeps its own; the others need not know it

        def decide(proposals: list[_Proposal]) -> list[tuple[Sequence[ChunkToWrite], int]]:
            contents, chunks = self._agreed(proposals)
            decisions.append(AgreedSave(existing[0], contents))
            writers = sum(map(bool, chunks))
            return [(part, writers) for part in chunks]

        chunks, writers = self.ranks.reduce_scatter("plan", lambda: proposal, decide)
        return WritePlan(generation, chunks, writers, decisions[0] if decisions else None)

    def _first_with_the_same_tree(self) -> int:
        """The lowest rank whose tree is the same as this rank's."""
        if self.ranks.world_size == 1:
            return 0
        digest = xxhash.xxh3_128_digest(dumps(self.captured.tree).encode())
        return self.ranks.all_gather_object(digest).index(digest)

    def _agreed(self, proposals: list[_Proposal]) -> tuple[CheckpointContents, Sequence[Sequence[ChunkToWrite]]]:
        """One checkpoint out of what all ranks propose, and the chunks that each of them writes."""
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
        parts = parts_of_shares(agreed.tensors, agreed.chunks)
        return self._contents(agreed.tensors, parts, tree, [proposal.kinds for proposal in proposals]), agreed.chunks

    def _refuse_empty_selection(self, tree: Any) -> None:
        if self._is_empty(tree):
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
class _Layout:
    """What a plan is computed from. Those with one digest are the same."""

    digest: bytes
    rank: int
    world_size: int
    cut_copies: bool
    descriptions: Sequence[TensorDescription] = field(compare=False)

    def shared_out(self) -> SharedPlan:
        return share_out(self.descriptions, self.rank, self.world_size, cut_copies=self.cut_copies)


@lru_cache(maxsize=4)
def known_plan(layout: _Layout) -> SharedPlan:
    """Made once for a state that is saved again and again."""
    return layout.shared_out()


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
