"""All that a report shows of a checkpoint, as plain JSON in compact columns.

The tree of keys is made in the browser. Nothing is read but what describes the checkpoint; statistics, digests and
differences are put in by those who took them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from math import prod
from typing import Any

from holdfast.reporting.describing import description
from holdfast.reporting.entries import Entry, entry_columns
from holdfast.reporting.placement import placement_columns
from holdfast.sources.source import Source
from holdfast.version import __version__

VERSION = 1


def facts_of(
    source: Source,
    entries: Sequence[Entry],
    *,
    statistics: Mapping[int, Any],
    unread: Mapping[int, str],
    verify: Mapping[str, Any] | None,
    compare: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The facts of a checkpoint with these entries."""
    placement = placement_columns(source, entries)
    return {
        "version": VERSION,
        "made": {"by": f"holdfast {__version__}", "time": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        "checkpoint": description(source),
        "totals": totals_of(source, entries),
        "entries": entry_columns(entries),
        "placement": placement,
        "statistics": statistics,
        "unread": unread,
        "verify": verify,
        "compare": compare,
    }


def totals_of(source: Source, entries: Sequence[Entry]) -> dict[str, Any]:
    """How much there is in all. Tied tensors count once."""
    refs = {ref.key: ref for entry in entries if (ref := entry.ref) is not None}
    dtypes: Counter[str] = Counter()
    for ref in refs.values():
        dtypes[str(ref.dtype)] += ref.nbytes
    files = source.files()
    return {
        "tensors": len(refs),
        "values": sum(entry.ref is None for entry in entries),
        "elements": sum(prod(ref.shape) for ref in refs.values()),
        "bytes": sum(ref.nbytes for ref in refs.values()),
        "dtypes": dict(dtypes),
        "files": len(files),
        "disk": sum(nbytes for _, nbytes in files),
    }
