"""A report: the facts of a checkpoint, and the page that shows them."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.checkpoint import Checkpoint, opened
from holdfast.garbage import no_garbage_collection
from holdfast.inspecting.verify import verify as verify_checkpoint
from holdfast.patterns import Patterns
from holdfast.progress import OnProgress, size
from holdfast.reporting.assets import page
from holdfast.reporting.comparing import compare_facts
from holdfast.reporting.entries import entries_of
from holdfast.reporting.facts import facts_of
from holdfast.reporting.sampling import chosen_tensors, statistics_facts
from holdfast.reporting.saving import write_page
from holdfast.reporting.work import Work
from holdfast.stores.store import Store

Place: TypeAlias = "str | os.PathLike[str] | Store | Checkpoint"

STYLES = ("base.css", "report.css")
SCRIPTS = (
    "dom.js",
    "units.js",
    "memory.js",
    "theme.js",
    "colours.js",
    "facts.js",
    "tree.js",
    "search.js",
    "squares.js",
    "colouring.js",
    "treemap.js",
    "virtual_list.js",
    "explorer.js",
    "chunks.js",
    "histogram.js",
    "panel.js",
    "filters.js",
    "balance.js",
    "timeline.js",
    "changes.js",
    "summary.js",
    "main.js",
)
"""In the order in which they stand in the page."""


@dataclass(frozen=True)
class Report:
    """A page about a checkpoint, whole in one text. A notebook shows it when it is the last thing in a cell."""

    path: str
    """Of the checkpoint."""
    facts: Mapping[str, Any] = field(repr=False)
    """What the page shows, as plain JSON."""
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page. It appears under its name when it is whole."""
        return write_page(Path(path), self.html)

    def __str__(self) -> str:
        totals = self.facts["totals"]
        return f"report of {self.path}: {totals['tensors']:,} tensors, a page of {size(len(self.html))}"

    def _repr_html_(self) -> str:
        # Nothing of the page can reach the notebook, and nothing of the notebook's styles the page.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="Report of a checkpoint" '
            'style="width:100%;height:820px;border:1px solid #8884;border-radius:8px"></iframe>'
        )


def make_report(
    checkpoint: Place,
    *,
    compare: Place | None = None,
    statistics: Patterns | bool | None = None,
    verify: bool = False,
    memory_budget: int | None = None,
    allow_pickle: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Make a page about a checkpoint of any format, which shows what is in it, how it is stored, and how it was saved.

    Args:
        checkpoint: a path, a store or an opened checkpoint.
        compare: an earlier checkpoint. All tensors of both are read, to tell what changed.
        statistics: patterns of the tensors whose elements are described, True for all and False for none. By default
            the largest ones are, as long as that does not take reading more than 256 MiB.
        verify: read everything and compare all digests, and show whether it is whole.
        memory_budget: how many bytes buffers may take; 64 MiB by default.
        allow_pickle: load values that were stored as pickles, which can run any code.
        on_progress: called with the bytes that are done, and those there are in all.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": {"weight": torch.ones(2, 4)}, "step": 100}, path)
        >>> report = make_report(path)
        >>> report.facts["totals"]["tensors"], report.html[:15]
        (1, '<!doctype html>')
    """
    with ExitStack() as stack:
        own = stack.enter_context(opened(checkpoint, allow_pickle=allow_pickle))
        other = None if compare is None else stack.enter_context(opened(compare, allow_pickle=allow_pickle))
        with no_garbage_collection():
            entries = entries_of(own.source)
            chosen = chosen_tensors(entries, statistics)
        whole = _bytes_of(own)
        parts = {
            "verify": whole if verify else 0,
            "statistics": sum(ref.nbytes for ref in chosen.values()),
            "compare": 0 if other is None else whole + _bytes_of(other),
        }
        work = Work(parts, on_progress)
        checked = _verified(own, memory_budget, work.part("verify")) if verify else None
        described, unread = statistics_facts(own.source, chosen, memory_budget, work.part("statistics"))
        changes = None if other is None else compare_facts(other, own, entries, memory_budget, work.part("compare"))
        with no_garbage_collection():
            facts = facts_of(own.source, entries, statistics=described, unread=unread, verify=checked, compare=changes)
    title = f"{facts['checkpoint']['name']} · Holdfast report"
    text = page("report.html", title=title, styles=STYLES, scripts=SCRIPTS, data=facts)
    return Report(facts["checkpoint"]["path"], facts, text)


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(ref.nbytes for ref in checkpoint.source.tensors.values())


def _verified(checkpoint: Checkpoint, memory_budget: int | None, on_progress: OnProgress) -> dict[str, Any]:
    found = verify_checkpoint(checkpoint, memory_budget=memory_budget, on_progress=on_progress)
    return {
        "ok": found.ok,
        "checked": found.checked,
        "why": found.why,
        "seconds": round(found.seconds, 3),
        "bytes": found.bytes_read,
        "damage": [str(damage) for damage in found.damage],
        "damagedKeys": found.damaged_keys,
    }
