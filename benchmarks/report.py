"""The table, for the terminal and for documents."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rows import describe

_MARKS = {True: "reached", False: "NOT REACHED", None: ""}


def on_terminal(rows: Sequence[Mapping[str, Any]], problems: Mapping[str, str]) -> str:
    """Two lines for each row: what came out, and from what."""
    lines = []
    section = None
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            lines += ["", section.upper()]
        lines.append(f"  {row['title']:<62} {row['value']:>16}  {row['target']:<22} {_MARKS[row['reached']]}".rstrip())
        sources = " | ".join(text for text in (row["ours"], row["other"]) if text)
        lines += textwrap.wrap(sources, 130, initial_indent="      ", subsequent_indent="      ")
    lines += ["", summary(rows)]
    lines += [f"PART FAILED: {part}: {reason}" for part, reason in problems.items()]
    return "\n".join(lines).rstrip()


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many targets there are, and how many were reached."""
    aimed = [row for row in rows if row["target"]]
    reached = [row for row in aimed if row["reached"]]
    return f"{len(reached)} of {len(aimed)} targets reached"


def as_markdown(rows: Sequence[Mapping[str, Any]], *, short: bool = False) -> str:
    """All rows with a target and, unless it shall be short, the others and where the numbers come from."""
    if short:
        lines = ["| | measured | target |", "|---|---|---|"]
        for row in rows:
            if row["target"]:
                missed = " **missed**" if row["reached"] is False else ""
                lines.append(f"| {row['section']}: {row['title']} | {row['value']}{missed} | {row['target']} |")
        return "\n".join(lines)
    lines = ["| | measured | target | reached | Holdfast | compared with |", "|---|---|---|---|---|---|"]
    for row in rows:
        reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
        cells = (f"{row['section']}: {row['title']}", row["value"], row["target"], reached, row["ours"], row["other"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def contenders_as_markdown(measures: Mapping[str, Mapping[str, Any]]) -> str:
    """Each measure with all that took part, the fastest first, and those that could not."""
    lines = ["| measure | contender | median (range, speed) |", "|---|---|---|"]
    for measure in measures.values():
        title, nbytes = measure["title"], measure["nbytes"]
        taken = {name: samples for name, samples in measure["samples"].items() if samples}
        fastest_first = sorted(taken, key=lambda name: statistics.median(taken[name]))
        lines += [f"| {title} | {name} | {describe(taken[name], nbytes)} |" for name in fastest_first]
        lines += [f"| {title} | {name} | {reason} |" for name, reason in measure["failed"].items()]
    return "\n".join(lines)
