"""The tables, for the terminal and for documents."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.machine import is_changed
from benchmarks.rounds import Measure
from benchmarks.rows import NOT_MEASURED, Row, rate, seconds, spread

_MARKS = {True: "reached", False: "NOT REACHED", None: ""}


def on_terminal(rows: Sequence[Row], problems: Mapping[str, str]) -> str:
    """Two lines for each row: what came out, and from what."""
    lines = []
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", section.upper()]
        lines.append(f"  {row.title:<62} {row.value:>16}  {row.target:<22} {_MARKS[row.reached]}".rstrip())
        lines += textwrap.wrap(row.details, 130, initial_indent="      ", subsequent_indent="      ")
    lines += ["", summary(rows)]
    lines += [f"PART FAILED: {part}: {reason}" for part, reason in problems.items()]
    return "\n".join(lines).rstrip()


def summary(rows: Sequence[Row]) -> str:
    """How many targets there are, and how many were reached."""
    aimed = [row for row in rows if row.target]
    reached = [row for row in aimed if row.reached]
    return f"{len(reached)} of {len(aimed)} targets reached"


def short_ratios(rows: Sequence[Row]) -> str:
    """For the README: how many times faster, with targets only."""
    chosen = [row for row in rows if row.is_ratio and row.target]
    return _table(("", "", "measured", "at least"), chosen, lambda row: (_marked(row), row.target))


def short_amounts(rows: Sequence[Row]) -> str:
    """For the README: bytes, memory and pauses."""
    chosen = [row for row in rows if not row.is_ratio]
    cells = ("", "", "Holdfast", "at most", "stock DCP")
    return _table(cells, chosen, lambda row: (_marked(row), row.target, row.other))


def ratios(rows: Sequence[Row], *, with_target: bool) -> str:
    """How many times faster, and what it was compared with: medians."""
    chosen = [row for row in rows if row.is_ratio and bool(row.target) == with_target]
    if with_target:
        heads = ("", "", "Holdfast", "the other", "ratio", "at least")
        return _table(heads, chosen, lambda row: (row.ours, row.other, _marked(row), row.target))
    return _table(("", "", "Holdfast", "the other", "ratio"), chosen, lambda row: (row.ours, row.other, row.value))


def amounts(rows: Sequence[Row]) -> str:
    """Bytes, memory and pauses, with what they come from."""
    chosen = [row for row in rows if not row.is_ratio]
    heads = ("", "", "measured", "at most", "stock DCP", "details")
    return _table(heads, chosen, lambda row: (_marked(row), row.target, row.other, row.details))


def contenders(measures: Mapping[str, Measure]) -> str:
    """Each measure with all that took part, the fastest first, and those that could not."""
    lines = _heads(("", "", "median", "fastest to slowest", "speed", "n"))
    for measure in measures.values():
        taken = {name: samples for name, samples in measure.samples.items() if samples}
        title = f"**{measure.title}**"
        for name in sorted(taken, key=lambda name: statistics.median(taken[name])):
            samples, median = taken[name], statistics.median(taken[name])
            cells = (
                _highlighted(name),
                seconds(median),
                spread(samples),
                rate(median, measure.nbytes),
                str(len(samples)),
            )
            lines.append(_line((title, *cells)))
            title = ""
        lines += [_line((title, name, reason, "", "", "")) for name, reason in measure.failed.items()]
    return "\n".join(lines)


def _highlighted(name: str) -> str:
    return f"**{name}**" if name.startswith("holdfast") else name


def _marked(row: Row) -> str:
    if row.value == NOT_MEASURED:
        return row.value
    return f"**{row.value}**" if row.reached else f"{row.value} (missed)"


def _table(heads: tuple[str, ...], rows: Sequence[Row], cells: Any) -> str:
    """One line for each row. The section stands before the first of its rows."""
    lines = _heads(heads)
    section = None
    for row in rows:
        first = "" if row.section == section else f"**{row.section}**"
        section = row.section
        lines.append(_line((first, row.title, *cells(row))))
    return "\n".join(lines)


def _heads(heads: tuple[str, ...]) -> list[str]:
    return [_line(heads), "|" + "---|" * len(heads)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def sizes_in_short(results: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """One sentence for the README."""
    parts = [f"{name} of {nbytes / 1e9:.1f} GB" for name, nbytes in sizes.items()]
    parts.append(f"{results['scale']['small_tensors']:,} small tensors of 1 KB")
    found = results["machine"]
    text = f"Measured with a {', a '.join(parts[:-1])} and {parts[-1]}" if sizes else f"Measured with {parts[-1]}"
    return "\n".join([*_cautions(results), f"{text}, on {found['cores']} cores and {found['disk']['file_system']}."])


def machine(results: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """What was measured, on what, and what a reader has to know before believing it."""
    found, scale = results["machine"], results["scale"]
    disk, holdfast = found["disk"], found["holdfast"]
    commit = f" at {holdfast['commit']}" if holdfast["commit"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines = [
        f"- {found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB of memory",
        f"- {disk['file_system']} ({disk.get('options', '')}) on {disk.get('device', 'an unknown device')}, "
        f"Linux {found['kernel']}",
        f"- Holdfast {holdfast['version']}{commit}, Python {found['python']}, {packages}",
        "- "
        + "; ".join(f"{name}: {nbytes / 1e9:.2f} GB" for name, nbytes in sizes.items())
        + f"; {scale['small_tensors']:,} small tensors of 1 KB",
        f"- {results['began'].replace('T', ' ').replace('Z', ' UTC')}, {results['seconds']:.0f} s, load average before "
        f"it {found['load_average_before']}",
    ]
    lines += [
        f"- {', '.join(later['parts'])}: measured later ({later['began'].replace('T', ' ').replace('Z', ' UTC')}, "
        f"at {later['commit']}, load average before it {later.get('load_average_before', 'unknown')})"
        for later in results.get("later", [])
    ]
    return "\n".join([*_cautions(results), *lines])


def _cautions(results: Mapping[str, Any]) -> list[str]:
    found = results["machine"]
    cautions = []
    if results["scale"]["name"] != "full":
        cautions.append(f"this is the {results['scale']['name']} suite, not the full one")
    if is_changed(found["holdfast"]["commit"]):
        cautions.append("the code had changes that are in no commit")
    if found["load_average_before"] > found["cores"] / 2:
        cautions.append("the machine was busy with other things")
    cautions += [f"{part} failed ({reason})" for part, reason in results["problems"].items()]
    return [f"**Caution: {'; '.join(cautions)}.**", ""] if cautions else []
