"""What ranks have written, on its way to the coordinator: a few arrays per rank instead of a record per item."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast._base.tuning import ENTRIES_AT_ONCE
from holdfast._dcp.shared_plan import ComputedPlan
from holdfast._dcp.storage import WriteResult
from holdfast._formats.dcp.columns import NO_HINT, Column, PlaceColumns
from holdfast._formats.dcp.metadata import MetadataIndex, Seal
from holdfast.errors import IncompleteSaveError


class StoredColumns(NamedTuple):
    """What one rank has written, in the order of writing."""

    host: str
    files: tuple[str, ...]
    columns: Column
    """A row per item, with the numbers of its key and its file, its offset and length, and its seal."""

    @classmethod
    def of(cls, results: Sequence[WriteResult], keys: Mapping[str, int]) -> StoredColumns:
        """``keys`` are the numbers of the keys."""
        files: dict[str, int] = {}
        rows = []
        for result in results:
            info = result.storage_data
            file = files.setdefault(info.relative_path, len(files))
            rows.append((keys[result.index.fqn], file, info.offset, info.length, *info.seal))
        columns = np.empty((len(rows), 4 + len(Seal._fields)), np.int64)
        for start in range(0, len(rows), ENTRIES_AT_ONCE):  # no other thread runs while one of them is converted
            columns[start : start + ENTRIES_AT_ONCE] = rows[start : start + ENTRIES_AT_ONCE]
        # Most numbers are small, and all of them travel.
        return cls(socket.gethostname(), tuple(files), columns.astype(np.min_scalar_type(int(columns.max(initial=0)))))

    def hosts(self) -> dict[str, str]:
        """The files, and on which machine they were written."""
        return dict.fromkeys(self.files, self.host)


def planned_places(plan: ComputedPlan, stored: Sequence[StoredColumns]) -> PlaceColumns:
    """Where all items are. Raises if one was not written that the plan has, or one that it has not."""
    counts = [len(part.columns) for part in stored]
    every = np.concatenate([part.columns.astype(np.int64) for part in stored])
    rank = np.repeat(np.arange(len(stored)), counts)
    first_file = np.cumsum([0, *(len(part.files) for part in stored)])[:-1]
    key = every[:, 0]
    hint = _chunk_of_each(plan, key, rank)
    chunks = [plan.chunks(number) for number in range(len(plan.description.keys))]
    is_value = np.array([columns is None for columns in chunks], bool)
    return PlaceColumns(
        fqns=plan.description.keys,
        chunks=chunks,
        files=[name for part in stored for name in part.files],
        places=(
            key,
            np.where(is_value[key], NO_HINT, hint),
            every[:, 1] + np.repeat(first_file, counts),
            every[:, 2],
            every[:, 3],
        ),
        seals=tuple(every[:, 4:].T),
    )


def _chunk_of_each(plan: ComputedPlan, key: Column, rank: Column) -> Column:
    """Which chunk of its key each item is, by the rank that has written it."""
    # The items of each key in the order of the ranks, which is that of its chunks.
    order = np.lexsort((rank, key))
    begins = np.searchsorted(key[order], np.arange(len(plan.description.keys) + 1))
    owners = [plan.owners(number) for number in range(len(plan.description.keys))]
    counts = np.array([len(own) for own in owners], np.int64)
    planned = [np.concatenate(owners[at : at + ENTRIES_AT_ONCE]) for at in range(0, len(owners), ENTRIES_AT_ONCE)]
    if not np.array_equal(np.diff(begins), counts) or not np.array_equal(
        rank[order], np.concatenate([*planned, np.empty(0, np.int64)])
    ):
        _refuse_what_was_not_planned(plan, rank[order], begins)
    hint = np.empty(len(key), np.int64)
    hint[order] = np.arange(len(key)) - np.repeat(begins[:-1], counts)
    return hint


def _refuse_what_was_not_planned(plan: ComputedPlan, rank: Column, begins: Column) -> None:
    """Raise. ``rank`` are those that have written the items of each key, from where ``begins`` says."""
    missing: list[str] = []
    for number in range(len(plan.description.keys)):
        wrote = rank[begins[number] : begins[number + 1]]
        if not np.array_equal(wrote, plan.owners(number)):
            missing += _not_written(plan, number, wrote)
    raise IncompleteSaveError(
        f"{len(missing)} planned item(s) were not written by any rank, or by another one than planned: "
        f"{', '.join(missing[:10])}. Nothing was committed; look for a writer that dropped them.",
        missing=missing,
    )


def _not_written(plan: ComputedPlan, number: int, ranks: Column) -> list[str]:
    fqn, chunks, owners = plan.description.keys[number], plan.chunks(number), plan.owners(number)
    wrong: Any = np.setdiff1d(np.arange(len(owners)), np.flatnonzero(np.isin(owners, ranks)))
    if chunks is None or not len(wrong):
        return [str(MetadataIndex(fqn))]
    return [str(MetadataIndex(fqn, chunks.offsets[row].tolist())) for row in wrong.tolist()]
