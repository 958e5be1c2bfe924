"""How the ranks of a load agree: on what they look at, on whether it fits, and on what they report."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from holdfast._formats.source import Source
from holdfast._load.options import LoadOptions
from holdfast._load.planning import RankPlan
from holdfast._load.read_division import ReadTerms
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
    views = ranks.different_views(opened(source))
    if views:
        raise RankDisagreementError(
            f"the ranks look at different checkpoints: {views}. Wait until a running save has finished and all ranks "
            "see the same files, then load again.",
            views=views,
        )


def opened(source: Source) -> str:
    """Which save was opened."""
    return f"{source.format} {source.identity}"


class LoadTerms(NamedTuple):
    """What ranks find out when they open a checkpoint, and what must be the same for those that read together."""

    opened: str
    """Which save was opened; nothing if that is not the same for all."""
    reading: ReadTerms

    @property
    def same_checkpoint(self) -> bool:
        """Whether all ranks have opened the same save."""
        return self.opened != ""

    @classmethod
    def of(cls, source: Source, reading: ReadTerms) -> LoadTerms:
        """Those of one rank."""
        return cls(opened(source), reading)

    @classmethod
    def joined(cls, given: Sequence[LoadTerms]) -> LoadTerms:
        """Those of several ranks."""
        same = len({each.opened for each in given}) == 1
        return cls(given[0].opened if same else "", ReadTerms.joined([each.reading for each in given]))


class Accord(NamedTuple):
    """Whether ranks have found the same, by digests, so that it need not travel; nothing if they have not."""

    on_proposal: bytes
    on_keys: bytes
    """On what becomes of which keys."""

    @classmethod
    def of(cls, plan: RankPlan, proposal: Proposal) -> Accord:
        """That of one rank with itself."""
        found = plan.found
        transformed = [transform.key for transform in found.transforms]
        keys = [list(found.read), found.renamed, found.cast, transformed, list(found.missing), found.untouched]
        return cls(*(xxhash.xxh3_128_digest(repr(each).encode()) for each in (proposal, keys)))

    @classmethod
    def joined(cls, given: Sequence[Accord]) -> Accord:
        """That of several ranks."""
        return cls(*(each[0] if len(set(each)) == 1 else b"" for each in zip(*given, strict=True)))


class LoadAgreement(NamedTuple):
    """What all ranks found together."""

    problems: Mismatches
    unexpected: Sequence[str]
    """Stored keys that no rank has a place for."""
    not_requested: Sequence[str]
    """Stored keys of parts that no rank has in its state."""
    settled: frozenset[str] = frozenset()
    """Keys that are loaded under another name of their tensor, as those ranks say that have elements of it."""
    same_keys: bool = False
    """Whether all ranks do the same with the same keys."""


def agree(ranks: Collectives, plan: RankPlan, options: LoadOptions) -> LoadAgreement:
    """Put together what the ranks found."""
    proposal = _sent_once(ranks, Proposal.of(plan, options))
    return ranks.all_reduce("agree", lambda: proposal, lambda proposals: decided(proposals, options))


def decided(proposals: Sequence[Proposal | None], options: LoadOptions) -> LoadAgreement:
    """What follows from what the ranks found; None stands for what another one has found as well."""
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


class Proposal(NamedTuple):
    """What one rank has to say about its plan."""

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
    def of(cls, plan: RankPlan, options: LoadOptions) -> Proposal:
        """What is to be said about a plan."""
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


def _settled(proposals: Sequence[Proposal]) -> frozenset[str]:
    """A rank without elements of a tensor cannot see which names it has, and goes by what the others say."""
    settled = {key for proposal in proposals for key in proposal.settled}
    return frozenset(settled.difference(*(proposal.missing for proposal in proposals)))


class RankReport(NamedTuple):
    """What a load did on one rank, or on several that are joined."""

    report: LoadReport
    slowest: tuple[float, int]
    """The longest reading in seconds, without those for which the rank waited for others, and minus that rank."""

    @classmethod
    def joined(cls, given: Sequence[RankReport]) -> RankReport:
        """Those of several ranks as one."""
        reports = [each.report for each in given]
        slowest = max(each.slowest for each in given)
        report = LoadReport.merged(
            reports,
            bytes_read=sum(report.bytes_read for report in reports),
            bytes_received=sum(report.bytes_received for report in reports),
            elements=sum(report.elements for report in reports),
            seconds=max(report.seconds for report in reports),
            slowest_rank=-slowest[1],
        )
        return cls(report, slowest)


def _sent_once(ranks: Collectives, thing: T) -> T | None:
    """The thing; None if a lower rank has an equal one, so that it need not be sent again."""
    if ranks.world_size == 1:
        return thing
    digests = ranks.all_gather("compare", lambda: xxhash.xxh3_128_digest(pickle.dumps(thing)))
    return thing if digests.index(digests[ranks.rank]) == ranks.rank else None


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    everywhere = set(lists[0]).intersection(*lists[1:])
    return [key for key in lists[0] if key in everywhere]
