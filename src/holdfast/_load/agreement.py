"""How the ranks of a load agree: on what they look at, on whether it fits, and on what they report."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from holdfast._formats.source import Source
from holdfast._load.options import LoadOptions
from holdfast._load.planning import RankPlan
from holdfast._load.report import LoadReport
from holdfast._load.targets import held_elements
from holdfast._state.mismatches import Mismatches
from holdfast.errors import RankDisagreementError

if TYPE_CHECKING:
    from holdfast._ranks.shared_steps import Collectives

T = TypeVar("T")

ADVICE = {
    "missing": "allow_missing=[...] leaves such keys as they are; rename={stored: wanted} finds them.",
    "unexpected": "allow_unexpected=[...] passes such keys over.",
    "dtypes": "cast=True, or cast=[patterns], allows conversions.",
}
"""What can be said to a load about what does not fit."""


def refuse_different_checkpoints(ranks: Collectives, source: Source) -> None:
    """Raise if the ranks have not opened the same save."""
    views = ranks.different_views(f"{source.format} {source.identity}")
    if views:
        raise RankDisagreementError(
            f"the ranks look at different checkpoints: {views}. Wait until a running save has finished and all ranks "
            "see the same files, then load again.",
            views=views,
        )


class LoadAgreement(NamedTuple):
    """What all ranks found together."""

    problems: Mismatches
    unexpected: Sequence[str]
    """Stored keys that no rank has a place for."""
    not_requested: Sequence[str]
    """Stored keys of parts that no rank has in its state."""
    settled: frozenset[str] = frozenset()
    """Keys that are loaded under another name of their tensor, as those ranks say that have elements of it."""


def agree(ranks: Collectives, plan: RankPlan, options: LoadOptions) -> LoadAgreement:
    """Put together what the ranks found."""
    proposal = _sent_once(ranks, _Proposal.of(plan, options))

    def decide(proposals: list[_Proposal | None]) -> LoadAgreement:
        known = [proposal for proposal in proposals if proposal is not None]
        whole = Mismatches()
        for proposal in known:
            whole.add(proposal.problems)
        settled = _settled(known)
        whole.missing = [key for key in whole.missing if key not in settled]
        unexpected = _common([proposal.unexpected for proposal in known])
        whole.unexpected = [key for key in unexpected if not options.may_be_unexpected(key)]
        if not any(proposal.has_loads for proposal in known) and any(proposal.has_other_keys for proposal in known):
            whole.kinds.setdefault(
                "", "gets nothing from this checkpoint: none of its keys is stored there, or was asked for"
            )
        return LoadAgreement(whole, unexpected, _common([proposal.not_requested for proposal in known]), settled)

    return ranks.all_reduce("agree", lambda: proposal, decide)


class _Proposal(NamedTuple):
    """What one rank sends the others about its plan."""

    problems: Mismatches
    unexpected: Sequence[str]
    not_requested: Sequence[str]
    has_loads: bool
    """Whether it loads anything."""
    has_other_keys: bool
    """Whether its state has keys that it may leave as they are."""
    settled: Sequence[str]
    """Keys that are loaded under another name of their tensor."""
    missing: Sequence[str]
    """Keys of tensors that are not stored, whether they may be missing or not, and of which it has elements."""

    @classmethod
    def of(cls, plan: RankPlan, options: LoadOptions) -> _Proposal:
        found = plan.found
        missing = [key for key in found.missing if not options.may_be_missing(key)]
        problems = Mismatches(
            missing=missing,
            shapes=found.shapes,
            dtypes=found.dtypes,
            kinds=found.misfits,
            uncovered=dict(plan.uncovered),
            errors=found.errors,
            stored_keys=plan.stored_keys if missing else (),
        )
        return cls(
            problems,
            plan.unexpected,
            plan.not_requested,
            has_loads=bool(found.read or found.transforms),
            has_other_keys=bool(found.untouched) or (bool(found.missing) and not options.strict),
            settled=found.settled,
            missing=[key for key, target in found.missing.items() if target is None or held_elements(target) != 0],
        )


def _settled(proposals: Sequence[_Proposal]) -> frozenset[str]:
    """A rank without elements of a tensor cannot see which names it has, and goes by what the others say."""
    settled = {key for proposal in proposals for key in proposal.settled}
    return frozenset(settled.difference(*(proposal.missing for proposal in proposals)))


class Numbers(NamedTuple):
    """What a load did on one rank."""

    bytes_read: int
    bytes_received: int
    elements: int
    reading: float
    """Seconds, without those for which the rank waited for others."""
    seconds: float
    """All in all."""


def reported(ranks: Collectives, lists: LoadReport, own: Numbers) -> LoadReport:
    """The report of all ranks, given the keys and the numbers of each."""
    keys = _sent_once(ranks, lists)

    def merge(parts: list[tuple[LoadReport | None, Numbers]]) -> LoadReport:
        numbers = [own for _, own in parts]
        report = LoadReport.merged(
            [report for report, _ in parts if report is not None],
            bytes_read=sum(own.bytes_read for own in numbers),
            bytes_received=sum(own.bytes_received for own in numbers),
            elements=sum(own.elements for own in numbers),
            seconds=max(own.seconds for own in numbers),
        )
        return replace(report, slowest_rank=max(range(len(numbers)), key=lambda rank: numbers[rank].reading))

    return ranks.all_reduce("report", lambda: (keys, own), merge)


def _sent_once(ranks: Collectives, thing: T) -> T | None:
    """The thing; None if a lower rank has an equal one, so that it need not be sent again."""
    if ranks.world_size == 1:
        return thing
    digests = ranks.all_gather("compare", lambda: xxhash.xxh3_128_digest(pickle.dumps(thing)))
    return thing if digests.index(digests[ranks.rank]) == ranks.rank else None


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    everywhere = set(lists[0]).intersection(*lists[1:])
    return [key for key in lists[0] if key in everywhere]
