"""Saving by plans that every rank computes: when that is possible, and what the ranks exchange.

It takes a planner and a writer that do what ours do. A class that has something else to say about plans is asked, as
ever, and the objects that it knows travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._base.garbage import let_go_in_parts, no_garbage_collection
from holdfast._dcp.replicas import treat_differing
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.shared_plan import ComputedPlan, OwnCopies, SharedLayout, describe
from holdfast._dcp.stored_columns import StoredColumns
from holdfast._dcp.unchanged import is_unchanged, methods_of
from holdfast._dcp.writer import _FileSystemWriter
from holdfast._formats.dcp.plan import SavePlan
from holdfast._layout.part_owners import Settled
from holdfast._ranks.copies import added_up
from holdfast._ranks.differences import differing


class Offer(NamedTuple):
    """What a rank has to say before anybody plans; of several ranks together, what they agree on."""

    digest: bytes | None = None
    """Of all that the ranks must have in common; None if there is something that only plans can say."""
    copies: int = 0
    """0, added up over all ranks, if all copies are equal."""
    generation: str | None = None
    """What the names of files have in common. The coordinator says so."""

    @staticmethod
    def joined(offers: Sequence[Offer]) -> Offer:
        """What several ranks agree on.

        >>> Offer.joined([Offer(b"x", 1, "ab"), Offer(b"x", 2)])
        Offer(digest=b'x', copies=3, generation='ab')
        >>> Offer.joined([Offer(b"x"), Offer(b"y")]).digest is None
        True
        """
        digests = {offer.digest for offer in offers}
        return Offer(
            digests.pop() if len(digests) == 1 else None,
            added_up(offer.copies for offer in offers),
            next((offer.generation for offer in offers if offer.generation is not None), None),
        )


def does_what_ours_do(planner: object, writer: object) -> bool:
    """Whether everything that plans go through is known, so that nobody notices if there are none."""
    return (
        is_unchanged(planner, DefaultSavePlanner, _PLANNING)
        and isinstance(planner, DefaultSavePlanner)
        and not planner.enable_plan_caching
        and is_unchanged(writer, _FileSystemWriter, _WRITING)
        and isinstance(writer, _FileSystemWriter)
        and not writer.transforms.extensions
    )


_PLANNING = methods_of(
    DefaultSavePlanner,
    *("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"),
    *("resolve_data", "lookup_object", "transform_object"),
    *("_create_global_plan", "_dedup_save_plans", "_with_fingerprints", "_on_mismatch"),
)
_WRITING = methods_of(
    _FileSystemWriter,
    *("storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"),
    *("write_data", "finish", "_named", "_data_files", "_write_file"),
)


class SharedSave:
    """One save whose plan every rank computes."""

    def __init__(
        self, planner: DefaultSavePlanner, writer: _FileSystemWriter, rank: int, destination: str | None
    ) -> None:
        self._planner = planner
        self._writer = writer
        self._rank = rank
        self._layout: SharedLayout | None = None
        self._copies = OwnCopies(0, {}, {})
        self._destination = destination
        self.plan: ComputedPlan | None = None

    def offer(self) -> Offer:
        """What this rank has to say, once planner and writer are set up."""
        planner = self._planner
        description = describe(planner.state_dict, planner.peers)
        if description is None:
            return Offer()
        on_mismatch = planner._on_mismatch()
        options = (planner.flatten_state_dict, planner.dedup_save_to_lowest_rank, on_mismatch, planner.peers)
        paths = planner.mappings if planner.flatten_state_dict else None
        self._layout = SharedLayout(description, len(planner.peers), self._rank)
        if on_mismatch != "ignore":
            self._copies = self._layout.copies(planner.state_dict)
        generation = self._writer.prepare_shared_plan()
        # A process on its own has nobody to compare it with.
        alone = len(planner.peers) == 1
        digest = b"" if alone else description.digest((options, self._destination), paths)
        return Offer(digest, self._copies.share, generation)

    @property
    def copies(self) -> OwnCopies:
        """What this rank holds that others hold too."""
        return self._copies

    def settle(self, copies: Sequence[OwnCopies]) -> Settled:
        """On the coordinator, with the copies of all ranks, where some differ: raise, or warn and choose writers."""
        assert self._layout is not None
        found = differing(
            (item, rank, digest) for rank, own in enumerate(copies) for item, digest in own.digests.items()
        )
        keys = self._layout.description.keys
        treat_differing([(keys[key], groups) for (key, _), groups in found.items()], self._planner._on_mismatch())
        settled = {}
        for (key, part), groups in found.items():
            owner = min(min(ranks) for ranks in groups.values())
            settled[key, part] = owner, self._layout.bytes_of(key, part, copies[owner].value_bytes)
        return settled

    @no_garbage_collection()
    def decide(self, settled: Settled | None, generation: str) -> SavePlan:
        """What each rank writes, and in particular this one, to files with ``generation`` in their names."""
        assert self._layout is not None
        self.plan = self._layout.plan(
            self._copies.value_bytes, by_lowest=self._planner.dedup_save_to_lowest_rank, settled=settled
        )
        return SavePlan(self.plan.items_of(self._rank), self._writer.shared_prefix(generation))

    def write(self, own: SavePlan) -> StoredColumns:
        """Write what the plan says that this rank writes."""
        assert self.plan is not None
        future = self._writer.write_data(self._planner.finish_plan(own), self._planner)
        future.wait()
        results = future.value()
        with no_garbage_collection():
            stored = StoredColumns.of(results, self.plan.key_numbers)
        let_go_in_parts(results)
        return stored
