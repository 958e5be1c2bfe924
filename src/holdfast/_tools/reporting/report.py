"""A report: the facts of a checkpoint, and the page that shows them."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from holdfast._base.arguments import Size
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.patterns import Chooser, Patterns
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Source
from holdfast._load.checkpoint import Checkpoint, opened, source_of
from holdfast._stores.store import Store
from holdfast._tools.inspecting.diff import diff
from holdfast._tools.inspecting.diff_report import DiffReport
from holdfast._tools.inspecting.statistics import statistics_of
from holdfast._tools.inspecting.verify import verify as verify_checkpoint
from holdfast._tools.reporting.assets import page, write_page
from holdfast._tools.reporting.facts import KeyFacts, description, entries_of, entry_columns, facts_of, totals_of
from holdfast._tools.reporting.packing import Distinct, as_json_number
from holdfast._watching.progress import OnProgress, size
from holdfast.errors import HoldfastError, UnsupportedTensorError

# How much of a report is done: its parts read one after the other, and are reported as one.


class PartsOfReport:
    """Parts that read so many bytes each, as one progress.

    >>> reported = []
    >>> work = PartsOfReport({"verify": 100, "statistics": 50}, lambda done, total: reported.append((done, total)))
    >>> work.part("verify")(100, 100)
    >>> work.part("statistics")(20, 40)
    >>> reported
    [(100, 150), (125, 150)]
    """

    def __init__(self, nbytes: Mapping[str, int], on_progress: OnProgress | None) -> None:
        self._nbytes = dict(nbytes)
        self._done = dict.fromkeys(nbytes, 0.0)
        self._on_progress = on_progress

    def part(self, name: str) -> OnProgress:
        """A function that reports one part, in whichever units it counts."""

        def on_progress(done: int, total: int) -> None:
            self._done[name] = self._nbytes[name] * (done / total if total else 1.0)
            if self._on_progress is not None:
                self._on_progress(round(sum(self._done.values())), sum(self._nbytes.values()))

        return on_progress


# Which tensors of a checkpoint are described by statistics, and these as plain JSON.


_MOST_TENSORS = 24
_BINS = 48
_MOST_BYTES = 256 << 20
"""What is read for statistics if nobody said which are wanted: a second, or two."""


def chosen_tensors(entries: Sequence[KeyFacts], wanted: Patterns | bool | None) -> dict[int, TensorRef]:
    """The tensors to describe, by the number of their entry. Tied ones are described once."""
    refs: dict[str, tuple[int, TensorRef]] = {}
    is_meant = Chooser("*" if wanted is None or isinstance(wanted, bool) else wanted)
    for number, entry in enumerate(entries):
        ref = entry.ref
        if ref is not None and ref.nbytes and ref.key not in refs and wanted is not False and is_meant(entry.key):
            refs[ref.key] = (number, ref)
    found = dict(refs.values())
    return _largest(found) if wanted is None else found


def _largest(refs: Mapping[int, TensorRef]) -> dict[int, TensorRef]:
    chosen: dict[int, TensorRef] = {}
    left = _MOST_BYTES
    for number in sorted(refs, key=lambda number: (_is_of_an_optimizer(refs[number]), -refs[number].nbytes)):
        if refs[number].nbytes <= left and len(chosen) < _MOST_TENSORS:
            chosen[number] = refs[number]
            left -= refs[number].nbytes
    return chosen


def _is_of_an_optimizer(ref: TensorRef) -> bool:
    """Whether it looks like that. Such tensors are larger and less interesting than weights: they come after these."""
    return "optim" in ref.key.lower()


def statistics_facts(
    source: Source, chosen: Mapping[int, TensorRef], memory_budget: Size | None, on_progress: OnProgress
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The statistics of chosen tensors, and why others could not be read, by the number of their entry."""
    found: dict[int, dict[str, Any]] = {}
    unread: dict[int, str] = {}
    total, done = sum(ref.nbytes for ref in chosen.values()), 0
    for number, ref in chosen.items():
        try:
            statistics = statistics_of(source, [ref], bins=_BINS, memory_budget=memory_budget)
        except UnsupportedTensorError:  # of a dtype that is not counted with
            continue
        except (HoldfastError, OSError) as error:  # the rest can still be shown
            unread[number] = str(error)
            continue
        finally:
            done += ref.nbytes
            on_progress(done, total)
        found[number] = {
            "count": statistics.count,
            "finite": statistics.finite,
            "nan": statistics.nan,
            "inf": statistics.inf,
            "zeros": statistics.zeros,
            **{
                name: as_json_number(getattr(statistics, name))
                for name in ("minimum", "maximum", "mean", "std", "norm")
            },
            "counts": list(statistics.histogram),  # empty if there is nothing to draw
        }
    return found, unread


# What changed since another checkpoint, in columns beside those of the entries.


def compare_facts(
    other: Checkpoint,
    checkpoint: Checkpoint,
    entries: Sequence[KeyFacts],
    memory_budget: Size | None,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """How ``checkpoint``, with its entries, differs from ``other``, which was before."""
    found = diff(other, checkpoint, memory_budget=memory_budget, on_progress=on_progress)
    before = entries_of(source_of(other))
    gone = set(found.only_in_a)
    numbers = {entry.key: number for number, entry in enumerate(entries)}
    statuses = Distinct()
    equal = statuses.number("equal")
    status = [equal] * len(entries)
    for name, keys in (
        ("changed", [*found.changed_tensors, *found.changed_values]),
        ("dtype", found.changed_dtype),
        ("shape", found.changed_shape),  # says more than the one before, which may be so too
        ("added", found.only_in_b),
    ):
        for key in keys:
            status[numbers[key]] = statuses.number(name)
    if gone:
        statuses.number("removed")
    return {
        "checkpoint": description(source_of(other)),
        "totals": totals_of(source_of(other), before),
        "statuses": statuses.things,
        "status": status,
        "differences": {numbers[key]: difference for key, difference in _differences(found).items()},
        "removed": entry_columns([entry for entry in before if entry.key in gone]),
    }


def _differences(found: DiffReport) -> dict[str, dict[str, Any]]:
    """What is to be shown of each changed key."""
    shown: dict[str, dict[str, Any]] = {}
    for key, (old, new) in found.changed_values.items():
        shown[key] = {"old": old, "new": new}
    for key, (shape, _) in found.changed_shape.items():
        shown.setdefault(key, {})["wasShape"] = list(shape)
    for key, (dtype, _) in found.changed_dtype.items():
        shown.setdefault(key, {})["wasDtype"] = dtype
    for key, change in found.changed_tensors.items():
        shown.setdefault(key, {}).update(
            elements=change.differing,
            incomparable=change.incomparable,
            largest=as_json_number(change.largest),
            norm=as_json_number(change.norm),
            before=as_json_number(change.norm_before),
            relative=as_json_number(change.relative),
        )
    return shown


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
class HtmlReport:
    """A page about a checkpoint, all in one str. A notebook shows it when it is the last thing in a cell."""

    path: str
    """Of the checkpoint."""
    facts: Mapping[str, Any] = field(repr=False)
    """What the page shows, as plain JSON."""
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page. It appears under its name when it is complete."""
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
    memory_budget: Size | None = None,
    allow_pickle: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> HtmlReport:
    """Make a page about a checkpoint of any format, which shows what is in it, how it is stored, and how it was saved.

    Args:
        checkpoint: a path, a store or an opened checkpoint.
        compare: an earlier checkpoint. All tensors of both are read, to find what changed.
        statistics: patterns of the tensors whose elements are described, True for all and False for none. By default
            the largest ones are, as long as that does not take reading more than 256 MiB.
        verify: read everything and compare all digests, and show whether it is intact.
        memory_budget: how many bytes buffers may take; 64 MiB by default.
        allow_pickle: load values that were stored as pickles, which can run any code.
        on_progress: called with the bytes that are done, and those there are in all.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": {"weight": torch.ones(2, 4)}, "step": 100}, path)
        >>> report = make_report(path)
        >>> report.facts["totals"]["tensors"], report.html[:15]
        (1, '<!doctype html>')
    """
    with ExitStack() as stack:
        own = stack.enter_context(opened(checkpoint, allow_pickle=allow_pickle))
        other = None if compare is None else stack.enter_context(opened(compare, allow_pickle=allow_pickle))
        with no_garbage_collection():
            entries = entries_of(source_of(own))
            chosen = chosen_tensors(entries, statistics)
        whole = _bytes_of(own)
        parts = {
            "verify": whole if verify else 0,
            "statistics": sum(ref.nbytes for ref in chosen.values()),
            "compare": 0 if other is None else whole + _bytes_of(other),
        }
        work = PartsOfReport(parts, on_progress)
        checked = _verified(own, memory_budget, work.part("verify")) if verify else None
        described, unread = statistics_facts(source_of(own), chosen, memory_budget, work.part("statistics"))
        changes = None if other is None else compare_facts(other, own, entries, memory_budget, work.part("compare"))
        with no_garbage_collection():
            facts = facts_of(
                source_of(own), entries, statistics=described, unread=unread, verify=checked, compare=changes
            )
    title = f"{facts['checkpoint']['name']} · Holdfast report"
    text = page("report.html", title=title, styles=STYLES, scripts=SCRIPTS, data=facts)
    return HtmlReport(facts["checkpoint"]["path"], facts, text)


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(ref.nbytes for ref in source_of(checkpoint).tensors.values())


def _verified(checkpoint: Checkpoint, memory_budget: Size | None, on_progress: OnProgress) -> dict[str, Any]:
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
