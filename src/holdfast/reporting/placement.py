"""How tensors are cut over files and ranks, in columns.

Tensors of one shape are mostly cut in one way and over the same files, so ways to cut and lists of files are told once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.reporting.entries import Entry
from holdfast.reporting.packing import Distinct
from holdfast.sources.source import ChunkPlace, Source

_MOST_BEGINS = 200_000
"""Where each chunk begins in its file is told if there are not more chunks than that: it is the one thing that never
repeats."""
_MOST_RANKS = 1 << 17


def placement_columns(source: Source, entries: Sequence[Entry]) -> dict[str, Any]:
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
    """The chunks of tensors, as far as they can be told: where that is damaged, the rest can still be shown."""

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
    noted = source.written.get("world_size")
    return noted if isinstance(noted, int) and 0 < noted <= _MOST_RANKS else 0
