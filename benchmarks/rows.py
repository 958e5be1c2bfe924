"""The rows of the table: what is compared, with what, and how much better it has to be."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contenders import MAPPED_PEER, OURS, OURS_DCP, PEERS, STOCK, STOCK_VARIANTS
from benchmarks.pauses import NOTHING
from benchmarks.rounds import Measure
from benchmarks.scales import FULL, MIB
from benchmarks.whole_states import (
    CACHED_READ,
    COLD_PROBES,
    DIRECT_WRITES,
    OURS_DCP_FROM_STOCK,
    OURS_FROM_STOCK,
)

MEMORY_MARGIN = 64 * MIB
LONGEST_PAUSE = 0.01
"""Python itself lets a thread that computes go on for 5 ms before another one may run."""


@dataclass(frozen=True)
class Row:
    """A row, filled in."""

    section: str
    title: str
    value: str
    """What was measured, as people read it."""
    target: str
    reached: bool | None
    """None if there is no target, or nothing to compare."""
    ours: str
    other: str
    ratio: float | None = None


Rule = Callable[[Mapping[str, Measure], Mapping[str, Mapping[str, Any]]], Row]


def fill_in(measures: Mapping[str, Measure], facts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows, also those for which something is missing."""
    return [asdict(rule(measures, facts)) for rule in RULES]


# --- seconds ---


def speed(
    section: str,
    title: str,
    key: str,
    others: Sequence[str],
    *,
    ours: str = OURS,
    at_least: float | None = None,
    aim: float | None = None,
) -> Rule:
    """How many times faster than the best of some others. A probe is usually faster: then it is less than 1."""
    target = "" if at_least is None else f"at least {at_least:g}x" + (f", aim {aim:g}x" if aim else "")

    def rule(measures: Mapping[str, Measure], _: Mapping[str, Mapping[str, Any]]) -> Row:
        measure = measures.get(key)
        if measure is None:
            return Row(section, title, "not measured", target, None, "", "")
        own = measure.samples.get(ours) or []
        found = {name: samples for name in others if (samples := measure.samples.get(name))}
        missing = "; ".join(f"{name} {measure.failed[name]}" for name in others if name in measure.failed)
        own_text = describe(own, measure.nbytes) if own else measure.failed.get(ours, "not measured")
        if not own or not found:
            return Row(section, title, "not measured", target, None, own_text, missing or "not measured")
        best = min(found, key=lambda name: statistics.median(found[name]))
        ratio = statistics.median(found[best]) / statistics.median(own)
        other_text = f"{best}: {describe(found[best], measure.nbytes)}" + (f" ({missing})" if missing else "")
        reached = None if at_least is None else ratio >= at_least
        return Row(section, title, f"{ratio:.2f}x", target, reached, own_text, other_text, ratio)

    return rule


def describe(samples: Sequence[float], nbytes: int) -> str:
    """The median, the range, and the speed."""
    median = statistics.median(samples)
    rate = f", {nbytes / median / 1e9:.2f} GB/s" if nbytes >= 64 * MIB else ""
    return f"{_seconds(median)} ({_seconds(min(samples))}..{_seconds(max(samples))}{rate})"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.{0 if value >= 0.1 else 1}f} ms"


# --- bytes ---


def contiguous_bytes(title: str, key_begin: str) -> Rule:
    """At most a tenth more than is needed, and a digest block at each end of each range. File headers are ranges."""
    target = "at most 1.1, and a digest block at each end of a range"

    def rule(_: Mapping[str, Measure], facts: Mapping[str, Mapping[str, Any]]) -> Row:
        found = [fact for key, fact in facts.items() if key.startswith(key_begin)]
        if not found:
            return Row("bytes read", title, "not measured", target, None, "", "")
        allowed = [1.1 * fact["needed"] + 2 * fact["digest_block"] * fact["ranges"] for fact in found]
        worst = max(found, key=lambda fact: fact["read"] / fact["needed"])
        ratio = worst["read"] / worst["needed"]
        return Row(
            "bytes read",
            title,
            f"{ratio:.3f}",
            target,
            all(fact["read"] <= most for fact, most in zip(found, allowed, strict=True)),
            f"{worst['read']:,} read of {worst['needed']:,} needed",
            f"stock DCP: {worst['read_by_stock']:,}" if "read_by_stock" in worst else "",
            ratio,
        )

    return rule


def column_bytes(title: str, key: str) -> Rule:
    """Nothing twice, and never more than the rows that are touched: their digest blocks, and those of file headers."""
    target = "no byte twice, at most the rows it touches"

    def rule(_: Mapping[str, Measure], facts: Mapping[str, Mapping[str, Any]]) -> Row:
        fact = facts.get(key)
        if fact is None:
            return Row("bytes read", title, "not measured", target, None, "", "")
        most = fact["rows_touched"] + (2 + fact["files"]) * fact["digest_block"]
        return Row(
            "bytes read",
            title,
            f"{fact['read'] / fact['rows_touched']:.3f} of the rows",
            target,
            fact["read_twice"] == 0 and fact["read"] <= most,
            f"{fact['read']:,} read, {fact['read_twice']:,} twice; {fact['needed']:,} needed, "
            f"{fact['rows_touched']:,} in the rows",
            f"stock DCP: {fact['read_by_stock']:,}",
            fact["read"] / fact["rows_touched"],
        )

    return rule


def extra_memory(title: str, verb: str) -> Rule:
    """The highest of all workloads against the budget."""
    margin = MEMORY_MARGIN // MIB
    target = f"at most memory_budget + {margin} MiB"

    def rule(_: Mapping[str, Measure], facts: Mapping[str, Mapping[str, Any]]) -> Row:
        fact = facts.get(f"memory {OURS}")
        if fact is None:
            return Row("memory", title, "not measured", target, None, "", "")
        peak = max(fact[verb].values())
        stock = facts.get(f"memory {STOCK}")
        return Row(
            "memory",
            title,
            f"{peak / MIB:.0f} MiB",
            target,
            peak <= fact["budget"] + MEMORY_MARGIN,
            "; ".join(f"{name} {extra / MIB:.0f} MiB" for name, extra in fact[verb].items())
            + f"; budget {fact['budget'] // MIB} MiB",
            "" if stock is None else f"stock DCP: {max(stock[verb].values()) / MIB:,.0f} MiB",
            peak / (fact["budget"] + MEMORY_MARGIN),
        )

    return rule


# --- pauses ---


def pause(title: str, key: str, ours: str) -> Rule:
    """The longest time that another thread was kept waiting."""
    target = f"a few milliseconds ({LONGEST_PAUSE * 1e3:.0f} at most)"

    def rule(measures: Mapping[str, Measure], _: Mapping[str, Mapping[str, Any]]) -> Row:
        measure = measures.get(key)
        own = [] if measure is None else measure.samples.get(ours) or []
        if measure is None or not own:
            return Row("pauses", title, "not measured", target, None, "", "")
        median = statistics.median(own)
        others = [name for name in (NOTHING, STOCK) if measure.samples.get(name)]
        return Row(
            "pauses",
            title,
            _seconds(median),
            target,
            median <= LONGEST_PAUSE,
            describe(own, 0),
            "; ".join(f"{name}: {describe(measure.samples[name], 0)}" for name in others),
        )

    return rule


# --- the table ---

_SAVE = "durable save"
_WARM = "warm load"
_COLD = "cold load"
_DCP = "files of DCP"
_SMALL = "20,000 tensors of 1 KB"
_HUGE = "one huge tensor"
_SLICES = "slices"
_RESHARDING = "resharding"
_BEST_STOCK = (STOCK, *STOCK_VARIANTS)
_LOADING_PEERS = (*PEERS, MAPPED_PEER)


def _saved_by(size: int) -> Rule:
    return speed(_RESHARDING, f"saved by {size} vs stock DCP", f"resharding save by {size}", (STOCK,))


def _resharded(before: int, after: int) -> Rule:
    title = f"saved by {before}, loaded by {after}, warm, vs stock DCP"
    return speed(_RESHARDING, title, f"resharding {before} to {after}", (STOCK,))


RULES: list[Rule] = [
    speed(_SAVE, "native save vs direct-write probe", "transformer save", tuple(DIRECT_WRITES), at_least=0.75, aim=0.9),
    speed(_SAVE, "native save vs stock DCP", "transformer save", (STOCK,), at_least=2),
    speed(_SAVE, "native save vs stock DCP with its best options", "transformer save", _BEST_STOCK, at_least=1.6),
    speed(_SAVE, "native save vs best other peer", "transformer save", PEERS, at_least=1.6),
    speed(_WARM, "native load vs cached-read probe", "transformer warm", (CACHED_READ,), at_least=0.6, aim=0.8),
    speed(_WARM, "native load vs stock DCP", "transformer warm", (STOCK,), at_least=4, aim=8),
    speed(_WARM, "native load vs best other peer", "transformer warm", _LOADING_PEERS),
    speed(_COLD, "native load vs cold-read probe", "transformer cold", COLD_PROBES, at_least=0.8),
    speed(_COLD, "native load vs stock DCP", "transformer cold", (STOCK,), at_least=2),
    speed(_COLD, "native load vs best other peer", "transformer cold", _LOADING_PEERS, at_least=1.2),
    speed(_DCP, "holdfast.dcp save vs stock DCP", "transformer save", (STOCK,), ours=OURS_DCP, at_least=1.6),
    speed(
        _DCP,
        "holdfast.dcp load of what stock DCP wrote, warm, vs stock DCP",
        "transformer warm",
        (STOCK,),
        ours=OURS_DCP_FROM_STOCK,
        at_least=3,
        aim=5,
    ),
    speed(
        _DCP,
        "holdfast.load of what stock DCP wrote, warm, vs stock DCP",
        "transformer warm",
        (STOCK,),
        ours=OURS_FROM_STOCK,
        at_least=3,
        aim=5,
    ),
    speed(_SMALL, "native save vs stock DCP", "small save", (STOCK,), at_least=20),
    speed(_SMALL, "native load vs stock DCP", "small warm", (STOCK,), at_least=20),
    speed(_SMALL, "native save vs best other peer", "small save", PEERS),
    speed(_SMALL, "native load vs best other peer", "small warm", PEERS),
    speed(_SMALL, "holdfast.dcp save vs stock DCP", "small save", (STOCK,), ours=OURS_DCP),
    speed(
        _SMALL,
        "holdfast.dcp load of what stock DCP wrote vs stock DCP",
        "small warm",
        (STOCK,),
        ours=OURS_DCP_FROM_STOCK,
    ),
    contiguous_bytes("rows of a tensor vs bytes needed", "slice rows"),
    contiguous_bytes("resharded loads vs bytes needed (the worst)", "resharding "),
    column_bytes("a few columns of some rows", "slice few columns"),
    column_bytes("half of the columns of some rows", "slice half of the columns"),
    extra_memory("peak extra memory of a save", "save"),
    extra_memory("peak extra memory of a load", "load"),
    pause("other threads during a save of 20,000 tensors", "pauses small", OURS),
    pause("other threads during a save of one huge tensor", "pauses huge", OURS),
    pause("other threads during holdfast.dcp.async_save of 20,000 tensors", "pauses small", OURS_DCP),
    pause("other threads during holdfast.dcp.async_save of one huge tensor", "pauses huge", OURS_DCP),
    speed(_HUGE, "native save vs direct-write probe", "huge save", tuple(DIRECT_WRITES)),
    speed(_HUGE, "native save vs stock DCP", "huge save", (STOCK,)),
    speed(_HUGE, "native load, warm, vs cached-read probe", "huge warm", (CACHED_READ,)),
    speed(_HUGE, "native load, warm, vs stock DCP", "huge warm", (STOCK,)),
    speed(_SLICES, "rows of a tensor, warm, vs stock DCP", "slice: rows", (STOCK,)),
    speed(_SLICES, "a few columns of some rows, warm, vs stock DCP", "slice: few columns", (STOCK,)),
    speed(_SLICES, "half of the columns of some rows, warm, vs stock DCP", "slice: half of the columns", (STOCK,)),
    *(_saved_by(size) for size in FULL.world_sizes),
    *(_resharded(before, after) for before, after in itertools.permutations(FULL.world_sizes, 2)),
]
