"""The rows of the table: what is compared, with what, and how much better it has to be."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import memory
from benchmarks.big_plans import FEW
from benchmarks.contenders import LOADING_PEERS, OURS, OURS_DCP, PEERS, STOCK, STOCK_VARIANTS
from benchmarks.conversions import UNCHECKED, UNFLUSHED
from benchmarks.many_ranks import FIRST, LATER, LOAD
from benchmarks.pauses import NOTHING
from benchmarks.read_once import LAYOUTS
from benchmarks.rounds import Measure
from benchmarks.scales import FULL, MIB
from benchmarks.stalls import BY_PROCESS, COPY, NO_SAVES, OVERLAPPED
from benchmarks.whole_states import (
    CACHED_READ,
    CACHED_WRITE,
    COLD_PROBES,
    DIRECT_READS,
    DIRECT_WRITES,
    OURS_DCP_FROM_STOCK,
    OURS_FROM_STOCK,
)

MEMORY_MARGIN = 64 * MIB

LONGEST_PAUSE = 0.01
"""Python lets a thread compute for 5 ms before another one may run, and the system takes some more until it does. With
nothing at all in the background the longest pause is a few milliseconds as well: the probe shows it."""

MOST_INDEX_BYTES = 600_000
"""A twentieth of 12 MB, for 300 tensors on 1,024 ranks, however large the index of stock DCP is here."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """A row, filled in."""

    section: str
    title: str
    value: str
    """What was measured, as people read it."""
    target: str
    reached: bool | None = None
    """None if there is no target, or nothing to compare."""
    ours: str = ""
    other: str = ""
    """The two that the value comes from, or what stock DCP takes, in short."""
    details: str = ""
    """The same with ranges, and who is missing."""
    is_ratio: bool = False
    """Whether the value says how many times faster Holdfast is."""


Measures = Mapping[str, Measure]
Facts = Mapping[str, Mapping[str, Any]]
Rule = Callable[[Measures, Facts], Row]


def fill_in(measures: Measures, facts: Facts) -> list[Row]:
    """All rows, also those for which something is missing."""
    return [rule(measures, facts) for rule in RULES]


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
    target = "" if at_least is None else f"{at_least:.3g}x" + (f", better {aim:g}x" if aim else "")

    def rule(measures: Measures, _: Facts) -> Row:
        measure = measures.get(key)
        if measure is None:
            return Row(section, title, NOT_MEASURED, target, is_ratio=True)
        own = measure.samples.get(ours) or []
        found = {name: samples for name in others if (samples := measure.samples.get(name))}
        missing = [f"{name} {measure.failed[name]}" for name in (ours, *others) if name in measure.failed]
        if not own or not found:
            return Row(section, title, NOT_MEASURED, target, details="; ".join(missing), is_ratio=True)
        best = min(found, key=lambda name: statistics.median(found[name]))
        ratio = statistics.median(found[best]) / statistics.median(own)
        compared = [
            f"{name}: {describe(samples, measure.nbytes)}" for name, samples in ((ours, own), (best, found[best]))
        ]
        return Row(
            section,
            title,
            f"{ratio:.2f}x",
            target,
            None if at_least is None else ratio >= at_least,
            seconds(statistics.median(own)),
            f"{best.removeprefix('probe: ')} {seconds(statistics.median(found[best]))}",
            "; ".join([*compared, *missing]),
            is_ratio=True,
        )

    return rule


def describe(samples: Sequence[float], nbytes: int) -> str:
    """The median, the range, the speed, and of how many samples."""
    median = statistics.median(samples)
    return f"{seconds(median)} ({spread(samples)}{rate(median, nbytes, ', ')}, n={len(samples)})"


def spread(samples: Sequence[float]) -> str:
    """From the fastest to the slowest."""
    return f"{seconds(min(samples))} to {seconds(max(samples))}"


def rate(median: float, nbytes: int, before: str = "") -> str:
    """Nothing if there are so few bytes that they do not matter."""
    return f"{before}{nbytes / median / 1e9:.2f} GB/s" if nbytes >= 64 * MIB else ""


def seconds(value: float) -> str:
    """As people read it."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.{0 if value >= 0.1 else 1}f} ms"


def cpu_per_gb(
    section: str, title: str, key: str, *, at_most: float, ours: str = OURS, in_samples: bool = False
) -> Rule:
    """Seconds of user and system time for each gigabyte. They may be what was measured, or beside it."""
    target = f"{at_most:.2f} s"

    def rule(measures: Measures, _: Facts) -> Row:
        measure = measures.get(key)
        found = {} if measure is None else measure.samples if in_samples else measure.cpu
        if measure is None or not found.get(OURS):
            return Row(section, title, NOT_MEASURED, target)
        per_gb = {name: statistics.median(used) / measure.nbytes * 1e9 for name, used in found.items() if used}
        stock = f"{STOCK} {per_gb[STOCK]:.2f} s" if STOCK in per_gb else ""
        details = "; ".join(
            f"{name}: {value:.2f} s" for name, value in sorted(per_gb.items(), key=lambda each: each[1])
        )
        own = f"{per_gb[OURS]:.2f} s"
        return Row(section, title, own, target, per_gb[OURS] <= at_most, own, stock, details)

    return rule


# --- bytes ---


def contiguous_bytes(title: str, key_begin: str) -> Rule:
    """At most a tenth more than is needed, and a digest block at each end of each range. File headers are ranges."""
    target = "1.1 of it, and a digest block at each end of a range"

    def rule(_: Measures, facts: Facts) -> Row:
        found = [fact for key, fact in facts.items() if key.startswith(key_begin)]
        if not found:
            return Row("bytes read", title, NOT_MEASURED, target)
        allowed = [1.1 * fact["needed"] + 2 * fact["digest_block"] * fact["ranges"] for fact in found]
        worst = max(found, key=lambda fact: fact["read"] / fact["needed"])
        stock = worst.get("read_by_stock")
        return Row(
            "bytes read",
            title,
            f"{worst['read'] / worst['needed']:.3f} of what is needed",
            target,
            all(fact["read"] <= most for fact, most in zip(found, allowed, strict=True)),
            f"{worst['read'] / 1e6:.1f} MB",
            "" if stock is None else f"{stock / worst['needed']:.3f} of it",
            f"{worst['read']:,} bytes read, {worst['needed']:,} needed",
        )

    return rule


def column_bytes(title: str, key: str) -> Rule:
    """Nothing twice, and never more than the rows that are touched: their digest blocks, and those of file headers."""
    target = "no byte twice, no more than the rows that it touches"

    def rule(_: Measures, facts: Facts) -> Row:
        fact = facts.get(key)
        if fact is None:
            return Row("bytes read", title, NOT_MEASURED, target)
        most = fact["rows_touched"] + (2 + fact["files"]) * fact["digest_block"]
        return Row(
            "bytes read",
            title,
            f"{fact['read'] / fact['rows_touched']:.3f} of the rows, {fact['read_twice']:,} bytes twice",
            target,
            fact["read_twice"] == 0 and fact["read"] <= most,
            f"{fact['read'] / 1e6:.1f} MB",
            f"{fact['read_by_stock'] / fact['rows_touched']:.3f} of the rows",
            f"{fact['read']:,} bytes read, {fact['needed']:,} needed, {fact['rows_touched']:,} in the rows",
        )

    return rule


def extra_memory(title: str, verb: str, *, stock_verb: str | None = None) -> Rule:
    """The highest of all workloads against the budget."""
    target = f"memory_budget + {MEMORY_MARGIN // MIB} MiB"

    def rule(_: Measures, facts: Facts) -> Row:
        fact = facts.get(f"memory {OURS}")
        if fact is None or not fact.get(verb):
            return Row("peak extra memory", title, NOT_MEASURED, target)
        peak = max(fact[verb].values())
        stock = facts.get(f"memory {STOCK}", {}).get(stock_verb or verb)
        each = "; ".join(f"{name} {extra / MIB:.0f} MiB" for name, extra in fact[verb].items())
        return Row(
            "peak extra memory",
            title,
            f"{peak / MIB:.0f} MiB, of {(fact['budget'] + MEMORY_MARGIN) / MIB:.0f}",
            target,
            peak <= fact["budget"] + MEMORY_MARGIN,
            f"{peak / MIB:.0f} MiB",
            f"{max(stock.values()) / MIB:,.0f} MiB" if stock else "",
            f"{each}; budget {fact['budget'] // MIB} MiB",
        )

    return rule


def memory_ratio(section: str, title: str, key: str, ours: str, at_most: float) -> Rule:
    """The memory that a conversion takes, as a part of what stock DCP takes for the same."""
    target = f"{at_most:g} of its memory"

    def rule(_: Measures, facts: Facts) -> Row:
        peaks = facts.get(key, {}).get("peaks", {})
        if ours not in peaks or not peaks.get(STOCK):
            return Row(section, title, NOT_MEASURED, target)
        ratio = peaks[ours] / peaks[STOCK]
        stock = f"{peaks[STOCK] / MIB:,.0f} MiB"
        return Row(
            section,
            title,
            f"{ratio:.3f} of it",
            target,
            ratio <= at_most,
            f"{peaks[ours] / MIB:.0f} MiB",
            stock,
            f"{peaks[ours] / MIB:.0f} MiB of {stock}",
        )

    return rule


def memory_limit(section: str, title: str, key: str, ours: str, most: int) -> Rule:
    """The memory that a conversion takes, against a limit."""
    target = f"{most // MIB} MiB"

    def rule(_: Measures, facts: Facts) -> Row:
        fact = facts.get(key, {})
        if ours not in fact.get("peaks", {}):
            return Row(section, title, NOT_MEASURED, target)
        peak = fact["peaks"][ours]
        found = f"{peak / MIB:.0f} MiB"
        return Row(section, title, found, target, peak <= most, found, details=f"for {fact['bytes'] / 1e9:.2f} GB")

    return rule


# --- pauses ---


def pause(title: str, key: str, ours: str) -> Rule:
    """The longest time that another thread was kept waiting."""
    target = f"a few milliseconds ({LONGEST_PAUSE * 1e3:.0f} at most)"

    def rule(measures: Measures, _: Facts) -> Row:
        measure = measures.get(key)
        own = [] if measure is None else measure.samples.get(ours) or []
        if measure is None or not own:
            return Row("pauses of other threads", title, NOT_MEASURED, target)
        median = statistics.median(own)
        stock = measure.samples.get(STOCK)
        others = [name for name in (NOTHING, STOCK) if measure.samples.get(name)]
        return Row(
            "pauses of other threads",
            title,
            seconds(median),
            target,
            median <= LONGEST_PAUSE,
            seconds(median),
            seconds(statistics.median(stock)) if stock else "",
            "; ".join(f"{name}: {describe(measure.samples[name], 0)}" for name in (ours, *others)),
        )

    return rule


# --- many ranks ---


def times_faster(title: str, key: str, *, ours: str = OURS, at_least: float) -> Rule:
    """How many times less processor time than stock DCP takes, of all ranks together."""
    return speed(_SCALE, title, f"{key} CPU", (STOCK,), ours=ours, at_least=at_least)


def exchange(title: str, nbytes: int, verbs: Sequence[str]) -> Rule:
    """The slowest of some saves or loads, in wall time; in processor time if it is the disk that takes that long."""
    target = f"{_EXCHANGE:g}x, or {_EXCHANGE:g}x less CPU"

    def rule(measures: Measures, _: Facts) -> Row:
        part = f"{nbytes // MIB} MiB"
        found = [
            (_ratio(measures[f"{part} {verb}"]), _ratio(measures[f"{part} {verb} CPU"]), verb)
            for verb in verbs
            if f"{part} {verb}" in measures
        ]
        if not found or any(not wall or not cpu for wall, cpu, _ in found):
            return Row(_SCALE, title, NOT_MEASURED, target, is_ratio=True)
        wall, cpu, verb = min(found, key=lambda each: max(each[:2]))
        samples = measures[f"{part} {verb}"].samples
        own, other = (seconds(statistics.median(samples[name])) for name in (OURS, STOCK))
        details = "; ".join(f"{verb}: {wall:.2f}x, CPU {cpu:.2f}x" for wall, cpu, verb in found)
        value = f"{wall:.2f}x, CPU {cpu:.2f}x"
        reached = max(wall, cpu) >= _EXCHANGE
        return Row(_SCALE, title, value, target, reached, own, f"{STOCK} {other}", details, is_ratio=True)

    return rule


def _ratio(measure: Measure) -> float:
    """How many times faster than stock DCP; 0 if one of both is missing."""
    own, other = measure.samples.get(OURS), measure.samples.get(STOCK)
    return statistics.median(other) / statistics.median(own) if own and other else 0.0


def plan_seconds(title: str, ours: str, at_most: float) -> Rule:
    """The root's processor time for one plan."""
    target = f"{seconds(at_most)}"

    def rule(measures: Measures, facts: Facts) -> Row:
        samples = {} if "plan" not in measures else measures["plan"].samples
        if not samples.get(ours) or not samples.get(STOCK):
            return Row(_SCALE, title, NOT_MEASURED, target)
        own, stock = (statistics.median(samples[name]) for name in (ours, STOCK))
        fact = facts[f"plan {ours}"]
        sent = f"{fact['bytes_in'] / 1e6:.2f} MB in, {fact['bytes_out'] / 1e6:.2f} MB out"
        what = f"{fact['ranks']:,} ranks, {fact['tensors']:,} tensors"
        return Row(_SCALE, title, seconds(own), target, own <= at_most, seconds(own), seconds(stock), f"{what}; {sent}")

    return rule


def index_bytes(title: str) -> Rule:
    """The record and what it needs to say which rank has what, as a part of stock's index."""
    target = f"0.05 of it, and {MOST_INDEX_BYTES / 1e6:g} MB"

    def rule(_: Measures, facts: Facts) -> Row:
        own, stock = facts.get("index", {}).get("index"), facts.get(f"plan {STOCK}", {}).get("index")
        if not own or not stock:
            return Row(_SCALE, title, NOT_MEASURED, target)
        few = facts[f"index of {FEW} ranks"]["index"]
        return Row(
            _SCALE,
            title,
            f"{own / stock:.4f} of it",
            target,
            own <= min(0.05 * stock, MOST_INDEX_BYTES),
            f"{own / 1e6:.2f} MB",
            f"{stock / 1e6:.2f} MB",
            f"{own:,} bytes of {stock:,}; saved by {FEW} ranks it is {few:,}",
        )

    return rule


def load_plan(title: str) -> Rule:
    """The processor time of one rank's load of what very many have saved, against what few have saved."""
    target = "2.0 of it"

    def rule(measures: Measures, _: Facts) -> Row:
        samples = {} if "load plan" not in measures else measures["load plan"].samples
        if not samples.get("by many") or not samples.get("by few"):
            return Row(_SCALE, title, NOT_MEASURED, target)
        many, few = (statistics.median(samples[name]) for name in ("by many", "by few"))
        details = f"{seconds(many)}, and {seconds(few)} of what {FEW} have saved"
        return Row(_SCALE, title, f"{many / few:.2f} of it", target, many / few <= 2, seconds(many), details=details)

    return rule


def read_once(layout: str) -> Rule:
    """The bytes that all ranks read from storage, as a multiple of those that are stored."""
    title, target = f"load of a {layout} state vs bytes stored", "1.05 of it"

    def rule(_: Measures, facts: Facts) -> Row:
        fact = facts.get(f"read once {layout}")
        if fact is None:
            return Row(_SCALE, title, NOT_MEASURED, target)
        ratio = fact["read"] / fact["unique"]
        return Row(
            _SCALE,
            title,
            f"{ratio:.3f} of it",
            target,
            ratio <= 1.05,
            f"{fact['read'] / 1e6:.1f} MB",
            f"{fact['read_by_stock'] / fact['unique']:.3f} of it",
            f"{fact['read']:,} bytes read by {fact['ranks']} ranks, {fact['unique']:,} stored",
        )

    return rule


# --- the table ---

_SAVE = "durable save"
_WARM = "warm load"
_COLD = "cold load"
_DCP = "files of DCP"
_SMALL = "small tensors"
_HUGE = "one huge tensor"
_CPU = "processor time per GB"
_STALLS = "background saves"
_SLICES = "slices"
_RESHARDING = "resharding"
_CONVERSIONS = "conversions"
_SCALE = "many ranks"
_EXCHANGE = 1.5
_BEST_STOCK = (STOCK, *STOCK_VARIANTS)


def _saved_by(size: int) -> Rule:
    return speed(_RESHARDING, f"saved by {size} vs stock DCP", f"resharding save by {size}", (STOCK,))


def _resharded(before: int, after: int) -> Rule:
    title = f"saved by {before}, loaded by {after}, warm, vs stock DCP"
    return speed(_RESHARDING, title, f"resharding {before} to {after}", (STOCK,))


def _by_many(size: int) -> Iterator[Rule]:
    for verb, at_least in ((FIRST, 3), (LATER, 6), (LOAD, 6)):
        yield times_faster(
            f"{verb} by {size} ranks, CPU of all, vs stock DCP", f"{size} ranks: {verb}", at_least=at_least
        )


_EXCHANGED = FULL.exchanged_bytes

RULES: list[Rule] = [
    speed(_SAVE, "native save vs direct-write probe", "transformer save", tuple(DIRECT_WRITES), at_least=0.95),
    speed(_SAVE, "native save vs cached-write probe", "transformer save", (CACHED_WRITE,)),
    speed(_SAVE, "native save vs stock DCP", "transformer save", (STOCK,), at_least=2),
    speed(_SAVE, "native save vs stock DCP with its best options", "transformer save", _BEST_STOCK, at_least=1.6),
    speed(_SAVE, "native save vs best other peer", "transformer save", PEERS, at_least=1.6),
    speed(_WARM, "native load vs cached-read probe", "transformer warm", (CACHED_READ,), at_least=0.8),
    speed(_WARM, "native load vs stock DCP", "transformer warm", (STOCK,), at_least=3),
    speed(_WARM, "native load vs best other peer", "transformer warm", LOADING_PEERS, at_least=1),
    speed(_COLD, "native load vs cold-read probe", "transformer cold", COLD_PROBES, at_least=0.85),
    speed(_COLD, "native load vs stock DCP", "transformer cold", (STOCK,), at_least=2),
    speed(_COLD, "native load vs best other peer", "transformer cold", LOADING_PEERS, at_least=1.4),
    speed(_COLD, "verify vs cold-read probe", "transformer verify", tuple(DIRECT_READS), at_least=0.9),
    speed(_DCP, "holdfast.dcp save vs stock DCP", "transformer save", (STOCK,), ours=OURS_DCP, at_least=1.6),
    speed(
        _DCP,
        "holdfast.dcp load of what stock DCP wrote, warm, vs stock DCP",
        "transformer warm",
        (STOCK,),
        ours=OURS_DCP_FROM_STOCK,
        at_least=2.5,
    ),
    speed(
        _DCP,
        "holdfast.load of what stock DCP wrote, warm, vs stock DCP",
        "transformer warm",
        (STOCK,),
        ours=OURS_FROM_STOCK,
        at_least=2.5,
    ),
    speed(_SMALL, "native save vs stock DCP", "small tensors save", (STOCK,), at_least=40),
    speed(_SMALL, "native load vs stock DCP", "small tensors warm", (STOCK,), at_least=40),
    speed(_SMALL, "native save vs best other peer", "small tensors save", PEERS, at_least=2),
    speed(_SMALL, "native load vs best other peer", "small tensors warm", LOADING_PEERS, at_least=2),
    speed(_SMALL, "holdfast.dcp save vs stock DCP", "small tensors save", (STOCK,), ours=OURS_DCP, at_least=8),
    speed(
        _SMALL,
        "holdfast.dcp load of what stock DCP wrote vs stock DCP",
        "small tensors warm",
        (STOCK,),
        ours=OURS_DCP_FROM_STOCK,
        at_least=8,
    ),
    cpu_per_gb(_CPU, "save", "transformer save", at_most=0.22),
    cpu_per_gb(_CPU, "warm load", "transformer warm", at_most=0.25),
    contiguous_bytes("rows of a tensor vs bytes needed", "slice rows"),
    contiguous_bytes("resharded loads vs bytes needed (the worst)", "resharding "),
    column_bytes("a few columns of some rows", "slice few columns"),
    column_bytes("half of the columns of some rows", "slice half of the columns"),
    extra_memory("save", memory.SAVE),
    extra_memory("load", memory.LOAD),
    extra_memory("load with a cast", memory.CAST),
    extra_memory("load of what stock DCP wrote", memory.DCP_LOAD, stock_verb=memory.LOAD),
    extra_memory("load of what stock DCP wrote, with a cast", memory.DCP_CAST),
    extra_memory("conversion of DCP files to torch.save", memory.CONVERSION),
    pause("native save of small tensors", "pauses small tensors", OURS),
    pause("native save of small tensors by two processes", "pauses small tensors by 2", OURS),
    pause("native save of one huge tensor", "pauses huge tensor", OURS),
    pause("holdfast.dcp.async_save of small tensors", "pauses small tensors", OURS_DCP),
    pause("holdfast.dcp.async_save of small tensors by two processes", "pauses small tensors by 2", OURS_DCP),
    pause("holdfast.dcp.async_save of one huge tensor", "pauses huge tensor", OURS_DCP),
    speed(_STALLS, "time in the call of async_save vs stock DCP", "stalls call", (STOCK,), at_least=5),
    speed(_STALLS, "time in the call of async_save vs one memory copy", "stalls call", (COPY,), at_least=1),
    speed(
        _STALLS,
        "time in the call, overlapped with training, vs one memory copy",
        "stalls call",
        (COPY,),
        ours=OVERLAPPED,
        at_least=25,
    ),
    speed(
        _STALLS,
        "training with overlapped saves vs without saves",
        "stalls loop",
        (NO_SAVES,),
        ours=OVERLAPPED,
        at_least=1 / 1.15,
    ),
    speed(_STALLS, "training with overlapped saves vs stock DCP", "stalls loop", (STOCK,), ours=OVERLAPPED),
    speed(_STALLS, "training with saves vs stock DCP", "stalls loop", (STOCK,)),
    speed(_STALLS, "training with saves by a process vs stock DCP", "stalls loop", (STOCK,), ours=BY_PROCESS),
    cpu_per_gb(_STALLS, "CPU per GB behind the call", "stalls behind", at_most=0.2, in_samples=True),
    speed(_HUGE, "native save vs direct-write probe", "huge tensor save", tuple(DIRECT_WRITES)),
    speed(_HUGE, "native save vs stock DCP", "huge tensor save", (STOCK,)),
    speed(_HUGE, "native load, warm, vs cached-read probe", "huge tensor warm", (CACHED_READ,)),
    speed(_HUGE, "native load, warm, vs stock DCP", "huge tensor warm", (STOCK,)),
    speed(_SLICES, "rows of a tensor, warm, vs stock DCP", "slice: rows", (STOCK,)),
    speed(_SLICES, "a few columns of some rows, warm, vs stock DCP", "slice: few columns", (STOCK,)),
    speed(_SLICES, "half of the columns of some rows, warm, vs stock DCP", "slice: half of the columns", (STOCK,)),
    speed(
        _CONVERSIONS,
        "dcp_to_torch_save of what stock DCP wrote vs stock DCP, which does not flush",
        "conversion to torch.save",
        (UNFLUSHED,),
        ours=OURS_DCP,
        at_least=3,
    ),
    speed(
        _CONVERSIONS,
        "dcp_to_torch_save of what stock DCP wrote vs stock DCP with a flush",
        "conversion to torch.save",
        (STOCK,),
        ours=OURS_DCP,
        at_least=5,
    ),
    speed(
        _CONVERSIONS,
        "convert the same to torch.save, and read it back, vs stock DCP with a flush",
        "conversion to torch.save",
        (STOCK,),
    ),
    memory_ratio(
        _CONVERSIONS, "memory of dcp_to_torch_save vs stock DCP", "memory of conversion to torch.save", OURS_DCP, 0.1
    ),
    memory_ratio(
        _CONVERSIONS, "memory of convert to torch.save vs stock DCP", "memory of conversion to torch.save", OURS, 0.1
    ),
    speed(
        _CONVERSIONS,
        "export to Hugging Face, not read back, vs direct-write probe",
        "export to Hugging Face",
        tuple(DIRECT_WRITES),
        ours=UNCHECKED,
    ),
    speed(
        _CONVERSIONS,
        "export to Hugging Face, read back and compared, vs direct-write probe",
        "export to Hugging Face",
        tuple(DIRECT_WRITES),
    ),
    memory_limit(_CONVERSIONS, "memory of export to Hugging Face", "memory of export to Hugging Face", OURS, 128 * MIB),
    plan_seconds("CPU of the root for one plan of holdfast.save", OURS, 0.15),
    plan_seconds("CPU of the root for one plan of holdfast.dcp.save", OURS_DCP, 0.6),
    index_bytes("index without digests vs that of stock DCP"),
    load_plan("CPU of one rank's load, saved by very many vs by few"),
    *(read_once(layout) for layout in LAYOUTS),
    *(rule for size in FULL.many_ranks for rule in _by_many(size)),
    *(exchange(f"{nbytes // MIB} MiB, save by 4 vs stock DCP", nbytes, ["save by 4"]) for nbytes in _EXCHANGED),
    *(
        exchange(
            f"{nbytes // MIB} MiB, load by 2 and by 4 (the slowest) vs stock DCP",
            nbytes,
            ["4 to 2", "2 to 4", "4 to 4"],
        )
        for nbytes in _EXCHANGED
    ),
    *(_saved_by(size) for size in FULL.world_sizes),
    *(_resharded(before, after) for before, after in itertools.permutations(FULL.world_sizes, 2)),
]
