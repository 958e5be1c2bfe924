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
from holdfast.sources.source import Piece, Source

_MOST_BEGINS = 200_000
"""Where each piece begins in its file is told if there are not more pieces than that: it is the one thing that never
repeats."""


def placement_columns(source: Source, entries: Sequence[Entry]) -> dict[str, Any]:
    """For every entry the number of its cut and of its list of files; all cuts, lists and files."""
    files, cuts, lists = Distinct(), Distinct(), Distinct()
    rank_of: dict[str, int | None] = {}
    known, written = _KnownPieces(source), _Written()
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
        pieces = known.of(entry.ref.key)
        cut.append(cuts.number(tuple((tuple(piece.offsets), tuple(piece.sizes)) for piece in pieces)))
        placed.append(lists.number(tuple(files.number(piece.file) for piece in pieces)))
        begins.append([piece.begin for piece in pieces])
        rank_of.update({piece.file: piece.rank for piece in pieces})
        if entry.ref.key not in seen:  # tied ones are stored once
            seen.add(entry.ref.key)
            written.add(pieces)
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
        "ranks": written.rows(),
        "problem": known.problem,
    }


class _KnownPieces:
    """The pieces of tensors, as far as they can be told: where that is damaged, the rest can still be shown."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.problem: str | None = None

    def of(self, key: str) -> Sequence[Piece]:
        if self.problem is None:
            try:
                return self._source.pieces(key)
            except HoldfastError as error:
                self.problem = str(error)
        return ()


class _Written:
    """What every rank wrote."""

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()
        self._pieces: Counter[int] = Counter()
        self._files: dict[int, set[str]] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.rank is not None:
                self._bytes[piece.rank] += piece.nbytes
                self._pieces[piece.rank] += 1
                self._files.setdefault(piece.rank, set()).add(piece.file)

    def rows(self) -> list[list[int]]:
        """Rank, bytes, pieces and files."""
        return [[rank, self._bytes[rank], self._pieces[rank], len(self._files[rank])] for rank in sorted(self._files)]
