"""What ranks find out in a preflight, and what it means when it is put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from holdfast._base.tuning import MEMORY_BUDGET, SMALLEST_BUDGET
from holdfast._manager.measuring import CheckpointSize, LocalState, MemoryLimit, WriteSpeed, shortages, size_of
from holdfast._manager.preflight_report import PreflightReport, Problem
from holdfast._manager.probing import find_unshared_disks
from holdfast._watching.progress import size

N = TypeVar("N", bound=float)


@dataclass(frozen=True)
class SaveSetup:
    """How checkpoints will be saved, as far as it matters here."""

    kept: int | None
    async_save: bool
    writer: Literal["thread", "process"]
    copies: int
    """Of the state, at most, that background saves have at once."""
    memory_budget: int | None


@dataclass
class PreflightFindings:
    """Those of one rank. They travel to the coordinator."""

    location: str = ""
    share: LocalState | None = None
    look_seconds: float = 0.0
    wrote: bool = False
    seen: frozenset[int] = frozenset()
    """The ranks whose objects are to be seen from here."""
    free: int | None = None
    stored_bytes: int = 0
    """Of checkpoints of the run that are there already, as the coordinator sees them."""
    limits: Sequence[MemoryLimit] = ()
    speed: WriteSpeed | None = None
    copy_rate: float | None = None
    writer_seconds: float | None = None
    problems: list[Problem] = field(default_factory=list)


def report_of(found: Sequence[PreflightFindings], how: SaveSetup) -> PreflightReport:
    """The report, given what every rank found."""
    problems = [problem for each in found for problem in each.problems]
    problems += _problems_of_places(found)
    sizes = _sizes(found, problems)
    needed, memory, stall, total = None, None, None, None
    if sizes is not None:
        needed = _needed_on_disk(sizes, how, stored_bytes=found[0].stored_bytes)
        memory = [_needed_in_memory(copied, how) for copied in sizes.copied]
        stall, total = _estimate(found, sizes, how)
        problems += _problems_of_space(found, sizes, needed, how)
        problems += _problems_of_memory(found, sizes, memory, how)
    speeds = [each.speed.rate for each in found if each.speed is not None]
    starts = [each.writer_seconds for each in found if each.writer_seconds is not None]
    return PreflightReport(
        path=found[0].location,
        world_size=len(found),
        is_async=how.async_save,
        problems=tuple(problems),
        tensor_count=None if sizes is None else sizes.tensor_count,
        checkpoint_bytes=None if sizes is None else sizes.nbytes,
        kept=how.kept,
        needed_bytes=needed,
        free_bytes=_least(each.free for each in found),
        memory_needed=None if memory is None else max(memory),
        memory_available=_least(limit.available for each in found for limit in each.limits),
        write_rate=sum(speeds) if len(speeds) == len(found) else None,
        copy_rate=_least(each.copy_rate for each in found),
        stall_seconds=stall,
        save_seconds=total,
        writer_seconds=max(starts, default=None),
    )


def _problems_of_places(found: Sequence[PreflightFindings]) -> Iterator[Problem]:
    """Ranks that were given another path, or find another folder there."""
    common = Counter(each.location for each in found).most_common(1)[0][0]
    elsewhere = {rank for rank, each in enumerate(found) if each.location != common}
    for rank in sorted(elsewhere):
        text = f"rank {rank} was given {found[rank].location}, and others {common}. All ranks must be given the same."
        yield Problem("path", (rank,), text)
    # Why a rank could not write is reported already, which explains the rest.
    views = {rank: each.seen - elsewhere for rank, each in enumerate(found) if each.wrote and rank not in elsewhere}
    yield from find_unshared_disks(common, views)


def _sizes(found: Sequence[PreflightFindings], problems: list[Problem]) -> CheckpointSize | None:
    shares = [each.share for each in found if each.share is not None]
    if len(shares) < len(found):
        return None
    try:
        return size_of(shares)
    except Exception as error:
        text = f"the ranks' parts of the state do not fit together: {type(error).__name__}: {error}"
        problems.append(Problem("state", tuple(range(len(found))), text))
        return None


def _needed_on_disk(sizes: CheckpointSize, how: SaveSetup, *, stored_bytes: int) -> int:
    """A new checkpoint is written before an old one goes."""
    if how.kept is None:
        return sizes.nbytes
    return max(sizes.nbytes, sizes.nbytes * (how.kept + 1) - stored_bytes)


def _problems_of_space(
    found: Sequence[PreflightFindings], sizes: CheckpointSize, needed: int, how: SaveSetup
) -> Iterator[Problem]:
    ranks = tuple(rank for rank, each in enumerate(found) if each.free is not None and each.free < needed)
    if ranks:
        free = _least(each.free for each in found) or 0
        kept = "" if how.kept is None else f", of which {how.kept} stay while one more is written,"
        text = (
            f"{found[ranks[0]].location} has {size(free)} ({free:,} bytes) free, and checkpoints of "
            f"{size(sizes.nbytes)}{kept} need {size(needed)} ({needed:,} bytes). Make space, or keep fewer."
        )
        yield Problem("space", ranks, text)


def _needed_in_memory(copied: int, how: SaveSetup) -> int:
    """Beyond the state, on one rank."""
    if not how.async_save:
        return MEMORY_BUDGET if how.memory_budget is None else how.memory_budget
    wanted = how.copies * copied + MEMORY_BUDGET
    return wanted if how.memory_budget is None else max(copied + SMALLEST_BUDGET, min(how.memory_budget, wanted))


def _problems_of_memory(
    found: Sequence[PreflightFindings], sizes: CheckpointSize, memory: Sequence[int], how: SaveSetup
) -> Iterator[Problem]:
    if how.async_save and how.memory_budget is not None:
        least = [copied + SMALLEST_BUDGET for copied in sizes.copied]
        ranks = tuple(rank for rank, needed in enumerate(least) if needed > how.memory_budget)
        if ranks:
            text = (
                f"memory_budget is {how.memory_budget:,} bytes, and a background save on rank(s) {list(ranks)} needs "
                f"{max(least):,}, for a copy of the state and to write it. Give it that, or save without async_save."
            )
            yield Problem("memory", ranks, text)
    for limit, ranks, together in shortages(memory, [each.limits for each in found]):
        way_out = "Save without async_save, which copies nothing, or get" if how.async_save else "Get"
        text = (
            f"{limit.source} leaves {size(limit.available)} ({limit.available:,} bytes), and saves take "
            f"{size(together)} ({together:,} bytes) beyond the state of rank(s) {list(ranks)}. {way_out} more memory."
        )
        yield Problem("memory", ranks, text)


def _estimate(
    found: Sequence[PreflightFindings], sizes: CheckpointSize, how: SaveSetup
) -> tuple[float, float] | tuple[None, None]:
    """Seconds for which training pauses, and until the checkpoint is committed. The slowest rank decides."""
    writing, copying, overhead = 0.0, 0.0, 0.0
    for each, written, copied in zip(found, sizes.written, sizes.copied, strict=True):
        if each.speed is None:
            return None, None
        writing = max(writing, each.speed.seconds_for(written))
        copying = max(copying, copied / each.copy_rate if each.copy_rate else 0.0)
        overhead = max(overhead, each.speed.overhead)
    look = max(each.look_seconds for each in found)
    total = look + copying + writing + overhead  # the record is one small write more
    return (look + copying if how.async_save else total), total


def _least(numbers: Iterable[N | None]) -> N | None:
    """The smallest of those that are known."""
    return min((number for number in numbers if number is not None), default=None)
