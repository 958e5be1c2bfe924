"""All that a report shows of a checkpoint, as plain JSON in compact columns."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import prod
from pathlib import PurePosixPath
from typing import Any

from holdfast._base.texts import plain
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ChunkPlace, Source
from holdfast._load.stored_nodes import StoredNode
from holdfast._manager.summaries import NOTE
from holdfast._tools.reporting.packing import Distinct, front_coded
from holdfast._version import __version__
from holdfast.errors import HoldfastError

# Values as short texts, however large they are.


_LONGEST = 200

_short = reprlib.Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = 12
_short.maxstring = _short.maxother = _LONGEST
_short.maxlevel = 4


def type_and_text(value: Any) -> tuple[str, str]:
    """The name of a value's type, and the beginning of how Python writes it.

    >>> type_and_text([1, 2]), type_and_text("a" * 1000)[1][:10]
    (('list', '[1, 2]'), "'aaaaaaaaa")
    """
    text = _short.repr(value)
    return type(value).__name__, text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# What a checkpoint is, in a few words: name, step, when, by whom, what was noted.


def description(source: Source) -> dict[str, Any]:
    """Plain JSON about a checkpoint as a whole."""
    noted = dict(source.metadata)
    run = noted.pop(NOTE, None)
    run = run if isinstance(run, dict) else {}
    written = dict(source.provenance)
    metrics = run.get("metrics")
    return {
        "name": name_of(source.location),
        "path": source.location,
        "format": source.format,
        "identity": source.identity,
        "run": run.get("run"),
        "step": run.get("step"),
        "reason": run.get("reason") or None,
        "metrics": plain(metrics if isinstance(metrics, dict) else {}),
        "metadata": plain(noted),
        "phases": _phases(written.pop("phases", None)),
        "phase_ranks": _ranks(written.pop("phase_ranks", None)),
        "written": plain(written),
    }


def name_of(location: str) -> str:
    """The last part of a path or URL, with its folder if that says more.

    >>> name_of("/runs/llama/step-00000500"), name_of("s3://bucket/run/"), name_of("model.pt")
    ('llama/step-00000500', 'bucket/run', 'model.pt')
    """
    parts = [
        part for part in PurePosixPath(location.replace("\\", "/")).parts if part != "/" and not part.endswith(":")
    ]
    return "/".join(parts[-2:]) or location


def _phases(found: Any) -> dict[str, list[float]]:
    """Seconds by phase and rank, if that is what was recorded: the file may say anything."""
    if not isinstance(found, Mapping):
        return {}
    return {
        str(name): [float(second) for second in seconds]
        for name, seconds in found.items()
        if isinstance(seconds, list) and all(isinstance(second, (int, float)) for second in seconds)
    }


def _ranks(found: Any) -> list[int] | None:
    """The ranks whose seconds are known, if these are not all."""
    return found if isinstance(found, list) and all(type(rank) is int for rank in found) else None


# The entries of a checkpoint in columns: what each key is.


VALUE = "value"
"""The kind of entries that are not tensors."""


@dataclass(frozen=True)
class KeyFacts:
    """A key, and the tensor or the value that it has."""

    key: str
    value: Any

    @property
    def ref(self) -> TensorRef | None:
        """The tensor, if it is one."""
        return self.value if isinstance(self.value, TensorRef) else None


def entries_of(source: Source) -> list[KeyFacts]:
    """All entries of a checkpoint, in its order."""
    return [KeyFacts(leaf.key, leaf.value) for leaf in StoredNode.of(source.tree).leaves()]


def entry_columns(entries: Sequence[KeyFacts]) -> dict[str, Any]:
    """Key, kind, dtype and shape of every entry; the text of values; which tensors have another's elements."""
    dtypes, shapes, kinds = Distinct(), Distinct(), Distinct()
    kind, dtype, shape = [], [], []
    values: dict[int, tuple[str, str]] = {}
    per_rank: dict[int, int] = {}
    tied: dict[int, int] = {}
    first_with: dict[str, int] = {}
    for number, entry in enumerate(entries):
        ref = entry.ref
        if ref is None:
            kind.append(kinds.number(VALUE))
            dtype.append(-1)
            shape.append(-1)
            values[number] = type_and_text(entry.value)
            continue
        kind.append(kinds.number(ref.kind))
        dtype.append(dtypes.number((str(ref.dtype), ref.dtype.itemsize)))
        shape.append(shapes.number(ref.shape))
        if ref.rank is not None:
            per_rank[number] = ref.rank
        if first_with.setdefault(ref.key, number) != number:
            tied[number] = first_with[ref.key]
    return {
        "key": front_coded(entry.key for entry in entries),
        "kind": kind,
        "dtype": dtype,
        "shape": shape,
        "kinds": kinds.things,
        "dtypes": dtypes.things,
        "shapes": shapes.things,
        "values": values,
        "perRank": per_rank,
        "tied": tied,
    }


# How tensors are cut over files and ranks, in columns.
#
# Tensors of one shape are mostly cut in one way and over the same files, so ways to cut and lists of files are listed
# once.


_MOST_BEGINS = 200_000
"""Where each chunk begins in its file is listed if there are not more chunks than that: it is the one thing that never
repeats."""
_MOST_RANKS = 1 << 17


def placement_columns(source: Source, entries: Sequence[KeyFacts]) -> dict[str, Any]:
    """For every entry the number of its cut and of its list of files; all cuts, lists and files."""
    files, cuts, lists = Distinct(), Distinct(), Distinct()
    rank_of: dict[str, int | None] = {}
    known, written = _KnownChunks(source), _Written()
    cut: list[int] = []
    placed: list[int] = []
    begins: list[list[int | None]] = []
    seen: set[str] = set()
    for entry in entries:
        if entry.ref is None:
            cut.append(-1)
            placed.append(-1)
            begins.append([])
            continue
        chunks = known.of(entry.ref.key)
        cut.append(cuts.number(tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)))
        placed.append(lists.number(tuple(files.number(chunk.file) for chunk in chunks)))
        begins.append([chunk.begin for chunk in chunks])
        rank_of.update({chunk.file: chunk.rank for chunk in chunks})
        if entry.ref.key not in seen:  # tied ones are stored once
            seen.add(entry.ref.key)
            written.add(chunks)
    sizes = dict(source.files())
    for name in sizes:
        files.number(name)
    return {
        "cut": cut,
        "placed": placed,
        "cuts": cuts.things,
        "lists": lists.things,
        "begins": begins if sum(map(len, begins)) <= _MOST_BEGINS else None,
        "files": [[name, sizes.get(name), rank_of.get(name)] for name in files.things],
        "ranks": written.rows(_world_size(source)),
        "problem": known.problem,
    }


class _KnownChunks:
    """The chunks of tensors, as far as they are known: where that is damaged, the rest can still be shown."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.problem: str | None = None

    def of(self, key: str) -> Sequence[ChunkPlace]:
        if self.problem is None:
            try:
                return self._source.chunk_places(key)
            except HoldfastError as error:
                self.problem = str(error)
        return ()


class _Written:
    """What every rank wrote."""

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()
        self._chunks: Counter[int] = Counter()
        self._files: dict[int, set[str]] = {}

    def add(self, chunks: Iterable[ChunkPlace]) -> None:
        for chunk in chunks:
            if chunk.rank is not None:
                self._bytes[chunk.rank] += chunk.nbytes
                self._chunks[chunk.rank] += 1
                self._files.setdefault(chunk.rank, set()).add(chunk.file)

    def rows(self, world_size: int) -> list[list[int]]:
        """Of all ranks, also those that had nothing to write: rank, bytes, chunks and files."""
        ranks = sorted({*range(world_size), *self._files}) if self._files else []
        return [[rank, self._bytes[rank], self._chunks[rank], len(self._files.get(rank, ()))] for rank in ranks]


def _world_size(source: Source) -> int:
    """How many ranks saved it; 0 if that is not recorded, or is no such number: the file may say anything."""
    noted = source.provenance.get("world_size")
    return noted if isinstance(noted, int) and 0 < noted <= _MOST_RANKS else 0


# The tree of keys is made in the browser. Nothing is read but what describes the checkpoint; statistics, digests and
# differences are put in by those who took them.


VERSION = 1


def facts_of(
    source: Source,
    entries: Sequence[KeyFacts],
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


def totals_of(source: Source, entries: Sequence[KeyFacts]) -> dict[str, Any]:
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
