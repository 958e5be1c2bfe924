"""How the ranks of a load divide the reading: each what it needs, or some of it for others as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import xxhash

from holdfast._base.boxes import Box, place_of
from holdfast._base.notices import warn_caller
from holdfast._base.tuning import MEMORY_BUDGET, MOST_WANTED_BYTES
from holdfast._formats.source import Into, Source
from holdfast._load.cooperative_reading import Buffers, CooperativeReading
from holdfast._load.filling import (
    DenseFills,
    Region,
    check_regions,
    count_changes,
    place_in,
    read_regions,
    regions_of,
)
from holdfast._load.options import LoadOptions, ShareReads
from holdfast._load.shared_reads import SharedReads, plan_shared_reads
from holdfast._load.shared_wants import Want, encode_wants, numbered
from holdfast._ranks.machines import machine_digest
from holdfast._ranks.transfers import Bytes, Parcel, Transfers
from holdfast.errors import RankDisagreementError

if TYPE_CHECKING:
    from holdfast._load.planning import RankPlan
    from holdfast._ranks.shared_steps import Collectives


class ReadResult(NamedTuple):
    """What reading came to on one rank."""

    bytes_read: int
    """From storage."""
    bytes_received: int
    """From other ranks."""
    elements: int
    """That were written."""


@dataclass(frozen=True)
class ReadDivision:
    """What one rank reads for itself alone, and what it reads and gets together with others."""

    source: Source
    regions: Sequence[Region]
    """That it reads for itself alone."""
    dense: DenseFills
    """Likewise."""
    together: CooperativeReading | None = None
    filled: Sequence[Region] = ()
    """What is filled by reading together, some of it in part."""

    def check(self, memory: int | None) -> None:
        """See whether what this rank will read is undamaged."""
        if self.together is not None:
            self.together.check()
        check_regions(
            [*self.regions, *(part for fill in self.dense.fills() for part in regions_of(fill))], self.source, memory
        )

    def read(self, *, verify: bool, memory: int | None, shared: bool) -> ReadResult:
        """Read everything to where it belongs. ``shared`` if other ranks do so too."""
        nbytes = received = elements = 0
        if self.together is not None:
            done = self.together.run()
            nbytes, received, elements = done.bytes_read, done.bytes_received, done.elements
            count_changes(self.filled)
        read, written = read_regions(
            self.regions, self.source, verify=verify, dense=self.dense, memory=memory, shared=shared
        )
        return ReadResult(nbytes + read, received, elements + written)


class ReadTerms(NamedTuple):
    """What must be the same for all ranks that read for each other."""

    modes: frozenset[ShareReads]
    """One that sees a store as a far one is enough: the others lose little."""
    memory: int
    """The least that any of them may use: it decides how large the parts are that are sent."""
    has_group: frozenset[bool]
    """Whether ranks were given a group to send over."""

    @classmethod
    def of(cls, options: LoadOptions, *, is_far: bool) -> ReadTerms:
        """Those of one rank. ``is_far`` if every read of it goes over a network."""
        mode: ShareReads = options.share_reads
        if mode == "auto":
            mode = "job" if is_far else "off"
        memory = MEMORY_BUDGET if options.memory_budget is None else options.memory_budget
        return cls(frozenset({mode}), memory, frozenset({options.transfer_group is not None}))

    @classmethod
    def joined(cls, given: Sequence[ReadTerms]) -> ReadTerms:
        """Those that hold for all."""
        return cls(
            frozenset().union(*(each.modes for each in given)),
            min(each.memory for each in given),
            frozenset().union(*(each.has_group for each in given)),
        )


def divide_reading(
    ranks: Collectives, plan: RankPlan, source: Source, options: LoadOptions, terms: ReadTerms
) -> ReadDivision:
    """Find out together who reads what, on terms that hold for all ranks."""
    alone = ReadDivision(source, plan.regions, plan.dense)
    if ranks.world_size == 1 or terms.modes == {"off"}:
        return alone
    sharing = _Sharing(ranks, plan, source, options, terms)
    lists = ranks.combine("share", sharing.prepare, _joined)
    views = ranks.combine("share", lambda: sharing.plan(lists), _joined_views)
    if any(len(digests) > 1 for digests in views.values()):
        warn_caller(_different_plans(views))
        return alone
    return sharing.divided(alone)


class _Sharing:
    """How one rank finds out who reads what for whom."""

    def __init__(
        self, ranks: Collectives, plan: RankPlan, source: Source, options: LoadOptions, terms: ReadTerms
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._source = source
        self._options = options
        self._terms = terms

    def prepare(self) -> _Lists | None:
        """What this rank wants; None if nobody is to be told."""
        group = self._options.transfer_group
        if len(self._terms.has_group) > 1:
            raise RankDisagreementError(
                "only some ranks were given a transfer_group, and would wait for the others in vain. Give it to all "
                "ranks that load, or to none.",
                views={self._ranks.rank: f"transfer_group={'a group' if group is not None else None}"},
            )
        self._own = _OwnWants(self._plan, self._source)
        self._transfers = self._ranks.transfers(group)
        self._message = encode_wants(self._own.wants)
        if "job" not in self._terms.modes or len(self._message) > MOST_WANTED_BYTES:
            return None
        return {xxhash.xxh3_128_digest(self._message): ([self._ranks.rank], self._message)}

    def plan(self, lists: _Lists | None) -> _Views:
        """Plan with all ranks, or with those of this rank's group. Others have to come to the same plan."""
        rank, transfers, source = self._ranks.rank, self._transfers, self._source
        if lists is not None:
            everyone: Messages = {tuple(same): message for same, message in lists.values()}
        else:
            exchange = _Exchange(transfers, rank, transfers.neighbours)
            everyone = exchange.wants(self._message, on_one_machine="job" not in self._terms.modes)
        self._buffers = Buffers.within(self._terms.memory, passes_on=lists is not None and len(transfers.strides) > 2)
        self._shared = plan_shared_reads(source, everyone, rank, self._buffers.part)
        terms = f"{self._buffers} {[*transfers.strides]}"
        return {min(map(min, everyone)): {self._shared.digest(terms): [rank]}}

    def divided(self, alone: ReadDivision) -> ReadDivision:
        """What comes of the plan."""
        if self._shared.is_empty:
            return alone
        together = CooperativeReading(
            self._shared,
            self._source,
            self._ranks.rank,
            self._own.places,
            self._transfers,
            self._buffers,
            verify=self._options.verify,
        )
        return self._own.divided(alone, self._shared, together)


_Views: TypeAlias = dict[int, dict[bytes, list[int]]]
"""By the lowest of the ranks that read for each other: digests of their plans, and some ranks with each."""

_MOST_NAMED = 4


def _joined_views(given: Sequence[_Views]) -> _Views:
    found: _Views = {}
    for views in given:
        for first, digests in views.items():
            for digest, ranks in digests.items():
                known = found.setdefault(first, {}).setdefault(digest, [])
                known += ranks[: _MOST_NAMED - len(known)]
    return found


def _different_plans(views: _Views) -> str:
    digests = next(digests for digests in views.values() if len(digests) > 1)
    named = "; ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in digests.values())
    return (
        f"ranks came to different plans of who reads what for whom ({named}, ...), so that each reads for itself, as "
        "with share_reads='off'. They may see different files of the checkpoint. If they do not, please report it."
    )


class _OwnWants:
    """What this rank wants, and where."""

    def __init__(self, plan: RankPlan, source: Source) -> None:
        self._dense = plan.dense
        numbers = {ref.key: number for number, ref in enumerate(numbered(source))}
        wholes = [
            Region(fill, Box((0,) * len(fill.ref.shape), tuple(fill.ref.shape)), fill.target.detach())
            for fill in plan.dense.fills()
        ]
        self._regions = [*plan.regions, *wholes]
        self._keys = [(numbers[region.fill.ref.key], _plain(region.box)) for region in self._regions]
        self.places: dict[tuple[int, Box], list[Into]] = defaultdict(list)
        for key, region in zip(self._keys, self._regions, strict=True):
            self.places[key].append(place_in(region))
        self.wants = [
            Want(*key, _is_dense(places)) for key, places in sorted(self.places.items(), key=lambda item: item[0])
        ]

    def divided(self, alone: ReadDivision, shared: SharedReads, together: CooperativeReading) -> ReadDivision:
        """What is left to this rank, and what is not."""
        regions: list[Region] = []
        filled: list[Region] = []
        first_dense = len(self._regions) - len(self._dense.keys)
        not_dense = []
        for position, (key, region) in enumerate(zip(self._keys, self._regions, strict=True)):
            if key not in shared.alone:
                if position < first_dense:
                    regions.append(region)
                continue
            filled.append(region)
            if position >= first_dense:
                not_dense.append(position - first_dense)
            for box in shared.alone[key]:
                memory = region.memory[place_of(*box, origin=region.box.offsets)]
                regions.append(replace(region, box=box, memory=memory))
        return replace(
            alone, regions=regions, dense=self._dense.without(not_dense)[0], together=together, filled=filled
        )


def _plain(box: Box) -> Box:
    """With numbers of Python, whatever a layout computes with."""
    return Box(tuple(map(int, box.offsets)), tuple(map(int, box.sizes)))


def _is_dense(places: Sequence[Into]) -> bool:
    return len(places) == 1 and isinstance(places[0], np.ndarray) and places[0].flags.c_contiguous


Messages: TypeAlias = dict[tuple[int, ...], bytes]
"""What ranks want, by the ranks that want just that."""


_Lists: TypeAlias = dict[bytes, tuple[list[int], bytes]]
"""What ranks want, by its digest, and the ranks that want just that."""


def _joined(lists: Sequence[_Lists | None]) -> _Lists | None:
    """The lists of several ranks, each of them once. None if that is too much for one rank to know of all others."""
    found: _Lists = {}
    for each in lists:
        for digest, (ranks, message) in (each or {}).items():
            found.setdefault(digest, ([], message))[0].extend(ranks)
    too_much = sum(len(message) for _, message in found.values()) > MOST_WANTED_BYTES
    return None if too_much or None in lists else found


_DIGESTS, _RECORD = 16, 40
"""Bytes: of a digest, and of what ranks exchange first."""


@dataclass(frozen=True)
class _Exchange:
    """How the ranks of a cell exchange what they want."""

    transfers: Transfers
    rank: int
    cell: Sequence[int]

    def wants(self, own: bytes, *, on_one_machine: bool) -> Messages:
        """What all want, by the ranks that want just that. Of those only one sends a list, to the ranks that differ."""
        message = np.frombuffer(own, np.uint8).copy()
        record = machine_digest() + xxhash.xxh3_128_digest(own) + message.nbytes.to_bytes(8, "little")
        records = self._gather(
            dict.fromkeys(self.cell, np.frombuffer(record, np.uint8).copy()), dict.fromkeys(self.cell, _RECORD)
        )
        found: dict[bytes, list[int]] = defaultdict(list)
        sizes: dict[int, int] = {}
        for rank, content in sorted(records.items()):
            machine, digest, size = content[:_DIGESTS], content[_DIGESTS : 2 * _DIGESTS], content[2 * _DIGESTS :]
            if not on_one_machine or machine == record[:_DIGESTS]:
                found[digest].append(rank)
                sizes[rank] = int.from_bytes(size, "little")
        groups = list(found.values())
        mine = next(group for group in groups if self.rank in group)
        members = [rank for group in groups for rank in group]
        outgoing = {rank: message for rank in members if self.rank == mine[0] and rank not in mine and message.nbytes}
        incoming = {group[0]: sizes[group[0]] for group in groups if group is not mine and sizes[group[0]]}
        lists = self._gather(outgoing, incoming)
        return {tuple(group): own if group is mine else lists.get(group[0], b"") for group in groups}

    def _gather(self, outgoing: dict[int, Bytes], incoming: dict[int, int]) -> dict[int, bytes]:
        """Send to some and receive so many bytes of some."""
        sends = [Parcel(rank, content) for rank, content in outgoing.items() if rank != self.rank]
        receives = [Parcel(rank, np.empty(size, np.uint8)) for rank, size in incoming.items() if rank != self.rank]
        self.transfers.exchange(sends, receives)
        found = {rank: content.tobytes() for rank, content in receives}
        if self.rank in incoming:
            found[self.rank] = outgoing[self.rank].tobytes()
        return found
