"""Repairs what data files with tables, and an index, lack although the record is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.record import DIGESTS_COMPUTED, Record
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, listed_parts
from holdfast._formats.native.writing import remove_unfinished
from holdfast._stores.store import Store
from holdfast._tools.repairing.data_files import FoundChunk, header_in, known_chunks
from holdfast._tools.repairing.report import Planned
from holdfast._tools.repairing.rewriting import Rewriting, put_in_place
from holdfast._tools.repairing.unrecorded import Digesting, repair_now
from holdfast._watching.progress import Progress
from holdfast.errors import DamagedCheckpointError, HoldfastError

NO_DIGESTS = (
    "the digests are computed from the data files as they are now, so that damage to them that was there before can no "
    "longer be noticed"
)
_COPY_AGAIN = (
    "copy the file again from where it is intact; or keep what is left with holdfast convert --exclude (in Python: "
    "load it with strict=False and include=...)"
)


def wrong_size(file: StoredFile, found: int | None) -> str:
    """What is wrong with the size of a file; empty if nothing is."""
    if found is None:
        return "the file is missing"
    return "" if found == file.nbytes else f"the file has {found} bytes, and should have {file.nbytes}"


def problems_of_tables(store: Store, record: Record, digesting: Digesting) -> Iterator[Planned]:
    """What is wrong with the files that a record names."""
    sizes = {listed.name: listed.size for listed in store.list()}
    lacking = False
    damaged: list[int] = []
    with closing(NativeSource(store, record=record)) as source:
        assert source.tables is not None
        for number, file in enumerate(record.files):
            found = sizes.get(file.name)
            if found is None or found < file.data_end or found > file.nbytes:
                lacking = True
                lost = _lost_keys(store, record, number, found or 0)
                yield Planned(store.path_of(file.name), wrong_size(file, found), _COPY_AGAIN, keys=lost)
                continue
            try:
                source.tables.table(number)
            except DamagedCheckpointError:
                damaged.append(number)
    if damaged:
        yield _tables_from_headers(store, record, damaged, digesting, lacking=lacking)
    if record.index is not None and not _is_intact(store, record):
        yield _index_from_tables(store, record, possible=not damaged and not lacking)


def _lost_keys(store: Store, record: Record, number: int, there: int) -> list[str]:
    """The tensors of which chunks in a file, of which so many bytes are there, are lost."""
    file = record.files[number]
    try:
        header = header_in(store, file.name, file.nbytes)
        chunks, _ = known_chunks([header], record.tensors)
    except (HoldfastError, OSError):
        return _keys_by_record(store, record, number)
    itemsizes = {ref.key: ref.dtype.itemsize for ref in record.tensors}
    return sorted(
        key
        for key, found in chunks.items()
        if any(chunk.begin + int(np.prod(chunk.sizes)) * itemsizes[key] > there for chunk in found)
    )


def _keys_by_record(store: Store, record: Record, number: int) -> list[str]:
    """The tensors that may have something in a file, by what the record says."""
    with closing(NativeSource(store, record=record)) as source:
        assert source.tables is not None
        try:
            return [ref.key for tensor, ref in enumerate(record.tensors) if number in source.tables.files_of(tensor)]
        except (HoldfastError, OSError):
            return []


def _tables_from_headers(
    store: Store, record: Record, damaged: Sequence[int], digesting: Digesting, *, lacking: bool
) -> Planned:
    path = store.path_of(record.files[damaged[0]].name)
    problem = "the table at the end of the file, which says where chunks are stored, is damaged"
    if len(damaged) > 1:
        problem += f"; so are those of {len(damaged) - 1} other file(s)"
    if lacking:
        return Planned(path, problem, "it can be rebuilt once all data files are there")
    try:
        headers = [header_in(store, record.files[number].name, record.files[number].nbytes) for number in damaged]
    except (HoldfastError, OSError) as error:
        return Planned(path, problem, f"it would be rebuilt from the header of its file, which cannot be read: {error}")
    found, unclear = known_chunks(headers, record.tensors)
    if unclear:
        key, what = next(iter(unclear.items()))
        remedy = f"{len(unclear)} tensor(s) cannot be put together from the data files, such as {key!r}, which {what}"
        return Planned(path, problem, remedy, keys=sorted(unclear))

    def rebuild() -> None:
        made = repair_now("columns", "the record and the headers of the data files", "computed")
        files, written = list(record.files), list[str]()
        to_write = {
            number: Rewriting(
                record.files[number],
                _chunks(record, found, place),
                {**_counts(record, number), DIGESTS_COMPUTED: made.time},
            )
            for place, number in enumerate(damaged)
        }
        progress = Progress(sum(rewriting.nbytes for rewriting in to_write.values()), digesting.on_progress)
        try:
            for number, rewriting in to_write.items():
                files[number] = rewriting.write(store, record.block_bytes, digesting.memory, progress.advance)
                written.append(files[number].name)
            put_in_place(store, replace(record, files=files), made)
        except HoldfastError:
            remove_unfinished(store, written)
            raise

    remedy = "written again, with a table made from the record and its header"
    return Planned(path, problem, remedy, NO_DIGESTS, do=rebuild)


def _chunks(record: Record, found: Mapping[str, Sequence[FoundChunk]], file: int) -> list[tuple[ChunkToWrite, int]]:
    """The chunks of a file, in the order of their tensors, each with its place in the file."""
    return [
        (ChunkToWrite(number, ref.key, ref.dtype, ref.shape, chunk.offsets, chunk.sizes), chunk.begin)
        for number, ref in enumerate(record.tensors)
        for chunk in found.get(ref.key, ())
        if chunk.file == file and 0 not in chunk.sizes
    ]


def _counts(record: Record, number: int) -> dict[str, str]:
    """What a table notes of how many files there are."""
    ranks = [file.rank for file in record.files]
    return {"files": str(ranks.count(ranks[number])), "ranks": str(len(set(ranks)))}


def _is_intact(store: Store, record: Record) -> bool:
    """Whether the index can be read."""
    with closing(NativeSource(store, record=record)) as source:
        assert source.tables is not None
        try:
            for tensor in range(len(record.tensors)):
                source.tables.parts_of(tensor)
        except (HoldfastError, OSError):
            return False
    return True


def _index_from_tables(store: Store, record: Record, *, possible: bool) -> Planned:
    assert record.index is not None
    path = store.path_of(record.index.name)
    problem = "the index, which says which ranks have stored what, is missing or damaged"
    if not possible:
        return Planned(path, problem, "it can be rebuilt once all data files are intact")

    def rebuild() -> None:
        put_in_place(store, record, repair_now("columns", "the record and the tables", "kept"), _parts(store, record))

    return Planned(path, problem, "rebuilt from the tables of the data files", do=rebuild)


def _parts(store: Store, record: Record) -> list[StoredParts]:
    """Who has stored what: by the rules that there are, and by the tables where there is none."""
    boxes: list[dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = [{} for _ in record.tensors]
    with closing(NativeSource(store, record=record)) as source:
        assert source.tables is not None
        for number, file in enumerate(record.files):
            table = source.tables.table(number)
            for tensor in np.unique(table.chunk_tensor).tolist():
                rows = table.boxes(*table.rows_of(tensor), len(record.tensors[tensor].shape))
                for offsets, sizes in zip(*rows, strict=True):
                    boxes[tensor].setdefault((tuple(offsets), tuple(sizes)), file.rank)
    places = record.places
    return [
        listed_parts((*box, rank) for box, rank in found.items())
        if division < 0
        else PartsByRule(WHOLE if 0 in ref.shape else places.divisions[division], first)
        for ref, found, division, first in zip(record.tensors, boxes, places.division_of, places.first_of, strict=True)
    ]
