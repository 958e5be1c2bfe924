"""Saves whose data files are there and whose record is not, and rebuilding what is missing."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np

from holdfast._base.threads import work_through
from holdfast._formats.native.blocks import Digests, count_blocks
from holdfast._formats.native.columns import decode_columns, digest_of, encode_columns, first_blocks, make_columns
from holdfast._formats.native.names import RECORD, generation_of, index_file, rank_of
from holdfast._formats.native.readable_files import OpenFiles, ReadableFile
from holdfast._formats.native.reading import read_size, read_with_digests, reader_count
from holdfast._formats.native.record import (
    BLOCK_BYTES,
    DIGESTS_COMPUTED,
    Origin,
    Record,
    Repair,
    What,
    encode_record,
    noted,
)
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.writing import remove_unfinished
from holdfast._formats.safetensors.header import Header, read_header
from holdfast._stores.store import Store, filling_from
from holdfast._tools.repairing.data_files import Parts, header_in, parts_of_unknown
from holdfast._tools.repairing.report import keep_copy
from holdfast._tools.repairing.rewriting import number_of
from holdfast._tools.repairing.rewriting import put_in_place as commit_record
from holdfast._tools.repairing.unrecorded_tables import UnrecordedTables, has_table
from holdfast._watching.progress import OnProgress, Progress
from holdfast.errors import DamagedCheckpointError, HoldfastError

# Writes the columns and the record of a checkpoint of version 1 whose data files are there.


@dataclass(frozen=True)
class Digesting:
    """How data files are read to compute their digests."""

    memory: int | None = None
    """What buffers may take, as everywhere."""
    on_progress: OnProgress | None = None

    def digests_of(self, store: Store, files: Sequence[StoredFile], block_bytes: int) -> Digests:
        """The digests of all blocks of all files, which several threads read in pieces."""
        starts = first_blocks(files, block_bytes)
        found = np.zeros(starts[-1], np.uint32)
        size = read_size(self.memory, block_bytes)
        pieces = [(number, begin) for number, file in enumerate(files) for begin in range(0, file.data_end, size)]
        progress = Progress(sum(file.data_end for file in files), self.on_progress)
        own = threading.local()

        def digest(piece: tuple[int, int]) -> None:
            number, begin = piece
            if not hasattr(own, "buffer"):
                own.buffer = np.empty(size, np.uint8)
            part = own.buffer[: min(size, files[number].data_end - begin)]
            with opened.using(number) as reader:
                digests = read_with_digests(filling_from(reader), begin, part.data, block_bytes)
            first = starts[number] + begin // block_bytes
            found[first : first + len(digests)] = digests
            progress.advance(part.nbytes)

        readable = [ReadableFile(file.name, file.data_end, partial(store.reader, file.name), None) for file in files]
        with closing(OpenFiles(readable, (number for number, _ in pieces))) as opened:
            work_through(pieces, digest, reader_count(self.memory, size), "holdfast-repair")
        return found


def put_in_place(store: Store, record: Record, parts: Parts, digests: Digests, repair: Repair) -> None:
    """Write the columns and commit the record, with a note of the repair. What was there before is kept, renamed."""
    assert record.index is not None
    name = record.index.name
    record = replace(record, written=noted(record.written, repair))
    notes = {DIGESTS_COMPUTED: repair.time} if repair.has_new_digests else {}
    rows = [
        (number, part.file, part.begin, part.offsets, part.sizes)
        for number, ref in enumerate(record.tensors)
        for part in parts.parts.get(ref.key, ())
        if 0 not in part.sizes
    ]
    content = encode_columns(make_columns(rows, digests), notes)
    index = StoredFile(name, len(content), digest_of(content))
    finished = replace(record, index=index)
    decode_columns(content, finished, store.path_of(index.name))  # nothing is put in place that readers would refuse
    encoded = encode_record(finished)
    old_index, old_record = keep_copy(store, index.name), keep_copy(store, RECORD)
    store.commit(index.name, content, replaces=old_index)
    store.sync()
    store.commit(RECORD, encoded, replaces=old_record)


def repair_now(what: What, source: str, digests: Origin) -> Repair:
    """The note of a repair that is made now."""
    return Repair(what, datetime.now(timezone.utc).isoformat(timespec="seconds"), source, digests)


# The columns of a checkpoint whose record is lost: what they say without it.
#
# They are written when all ranks have written their data files, so they prove that these are all there; and their
# digests show whether the data is as it was saved.


@dataclass(frozen=True)
class UnrecordedColumns:
    """Where chunks are stored, and digests; not which tensors they are of."""

    chunk_file: Any
    chunk_begin: Any
    digests: Digests
    block_bytes: int = BLOCK_BYTES
    """What writers use. The record would say, and other numbers of digests do not fit."""
    digests_computed: str = ""
    """When a repair has computed the digests; empty if they are those of the save."""

    @classmethod
    def read(cls, store: Store, name: str) -> UnrecordedColumns | None:
        """What a columns file says; None if there is none, or none that makes sense."""
        path = store.path_of(name)
        try:
            data = store.read(name)
            header = read_header(io.BytesIO(data), path)
            column = {
                wanted: np.frombuffer(
                    data, dtype, count=header.tensors[wanted].shape[0], offset=header.position(wanted)
                )
                for wanted, dtype in (("chunk_file", "<u4"), ("chunk_begin", "<u8"), ("digests", "<u4"))
            }
        except (FileNotFoundError, DamagedCheckpointError, KeyError, IndexError, ValueError):
            return None
        computed = header.notes.get(DIGESTS_COMPUTED, "")
        return cls(column["chunk_file"], column["chunk_begin"], column["digests"], digests_computed=computed)

    def describes(self, files: Sequence[StoredFile], headers: Sequence[Header]) -> bool:
        """Whether these are the files that it was written for, all of them."""
        if len(self.digests) != sum(count_blocks(file.nbytes, self.block_bytes) for file in files):
            return False
        if len(self.chunk_file) != len(self.chunk_begin):
            return False
        if len(self.chunk_file) and int(self.chunk_file.max()) >= len(files):
            return False
        for number, header in enumerate(headers):
            listed = sorted(self.chunk_begin[self.chunk_file == number].tolist())
            there = sorted(header.position(name) for name, stored in header.tensors.items() if stored.nbytes)
            if listed != there:
                return False
        return True


# The tree of a state of which nothing but keys is known.


_JSON = json.JSONDecoder()


def tree_of_keys(keys: Sequence[str]) -> Any:
    """The tree, as a record has it, in which every tensor is under its key.

    Dots in keys may be steps of a path or not, and loading takes both, so the tree is flat; but keys in brackets say
    their paths.

    >>> tree_of_keys(["model.weight", '["a.b"][0]'])["model.weight"]
    {'$': 'tensor', 'key': 'model.weight'}
    >>> tree_of_keys(["model.weight", '["a.b"][0]'])["a.b"]
    {'$': 'dict', 'items': [[0, {'$': 'tensor', 'key': '["a.b"][0]'}]]}
    """
    tree = _Branch()
    for key in keys:
        path = _path_in_brackets(key)
        if path is None or not tree.put(path, key):
            tree.children[json.dumps(key)] = key
    return tree.encoded()


class _Branch:
    """A dict while it is being filled. Its keys are JSON texts, since some cannot be keys of Python's dicts."""

    def __init__(self) -> None:
        self.children: dict[str, _Branch | str] = {}

    def put(self, path: Sequence[Any], tensor: str) -> bool:
        """Put a tensor at its path. False if something is in the way, which no state had."""
        branch = self
        for step in path[:-1]:
            below = branch.children.setdefault(json.dumps(step), _Branch())
            if not isinstance(below, _Branch):
                return False
            branch = below
        return branch.children.setdefault(json.dumps(path[-1]), tensor) == tensor

    def encoded(self) -> Any:
        """As a typed value of the format."""
        items = [
            (json.loads(step), {"$": "tensor", "key": child} if isinstance(child, str) else child.encoded())
            for step, child in self.children.items()
        ]
        if all(isinstance(step, str) and step != "$" for step, _ in items):
            return dict(items)
        return {"$": "dict", "items": [list(item) for item in items]}


def _path_in_brackets(key: str) -> list[Any] | None:
    """The steps of a key in brackets, as typed values; None for other keys."""
    steps: list[Any] = []
    end = 0
    while key.startswith("[", end):
        try:
            step, end = _JSON.raw_decode(key, end + 1)
        except ValueError:
            return None
        if not key.startswith("]", end):
            return None
        end += 1
        steps.append(step)
    return steps if steps and end == len(key) else None


# Saves whose data files are there and whose record is not.


def generations_in(store: Store) -> list[str]:
    """The saves that have data files in a store."""
    found = {generation_of(listed.name) for listed in store.list() if rank_of(listed.name) is not None}
    return sorted(generation for generation in found if generation is not None)


@dataclass(frozen=True)
class UnrecordedSave:
    """The data files of one save, without a record."""

    store: Store
    generation: str
    files: Sequence[StoredFile]
    parts: Parts | None
    columns: UnrecordedColumns | None
    """Of version 1, if they are there and list the same files."""
    trouble: str
    """Why the data files do not make up a checkpoint."""
    tables: UnrecordedTables | None = None
    """Of the data files, unless they are of version 1."""

    @property
    def is_proven(self) -> bool:
        """Whether it is sure that these are all files: columns are written when all ranks are done, and tables note
        how many files there are."""
        if self.trouble:
            return False
        return self.columns is not None if self.tables is None else self.tables.prove_all_files()

    @property
    def digests_computed(self) -> str:
        """When a repair has computed the digests; empty if they are those of the save."""
        if self.tables is not None:
            return self.tables.computed
        return "" if self.columns is None else self.columns.digests_computed

    @classmethod
    def of(cls, store: Store, generation: str) -> UnrecordedSave:
        """What is there of one."""
        listed = [file for file in store.list() if rank_of(file.name) is not None]
        listed = [file for file in listed if generation_of(file.name) == generation]
        files = [StoredFile(file.name, file.size) for file in sorted(listed, key=lambda file: _order(file.name))]
        try:
            headers = [header_in(store, file.name) for file in files]
            tables = UnrecordedTables(store, files, headers) if files and all(map(has_table, headers)) else None
            if tables is not None and (replaced := tables.replaced()):
                kept = [number for number, file in enumerate(files) if file.name not in replaced]
                files, headers = [files[number] for number in kept], [headers[number] for number in kept]
                tables = UnrecordedTables(store, files, headers)
            parts = parts_of_unknown(headers, [store.path_of(file.name) for file in files])
        except (HoldfastError, OSError) as error:
            return cls(store, generation, files, None, None, f"a data file cannot be read: {error}")
        if tables is not None:
            trouble = why_incomplete(parts) if parts.incomplete else tables.unclear(parts)
            return cls(store, generation, files, parts, None, trouble, tables)
        columns = UnrecordedColumns.read(store, index_file(generation))
        if columns is not None and not columns.describes(files, headers):
            lost = "the columns list other data files than there are: some are missing or were replaced"
            return cls(store, generation, files, parts, None, lost)
        trouble = why_incomplete(parts) if parts.incomplete else ""
        return cls(store, generation, files, parts, columns, trouble)

    def put_record(self, digesting: Digesting) -> None:
        """Make a checkpoint of the files."""
        assert self.parts is not None
        if self.tables is not None:
            self._put_record_of_tables(self.tables, self.parts, digesting)
            return
        block_bytes = BLOCK_BYTES if self.columns is None else self.columns.block_bytes
        digests = digesting.digests_of(self.store, self.files, block_bytes)
        if self.columns is not None:
            self._refuse_damage(digests, self.columns.digests, block_bytes)
        record = Record(
            generation=self.generation,
            files=self.files,
            index=StoredFile(index_file(self.generation), 0),
            tensors=self.parts.tensors,
            tree=tree_of_keys([ref.key for ref in self.parts.tensors]),
            block_bytes=block_bytes,
            version=(1, 0),
        )
        put_in_place(self.store, record, self.parts, digests, self._repair())

    def _put_record_of_tables(self, tables: UnrecordedTables, parts: Parts, digesting: Digesting) -> None:
        files = tables.data_files()
        found, expected = digesting.digests_of(self.store, files, BLOCK_BYTES), tables.digests()
        if expected is not None:
            self._refuse_damage(found, expected, BLOCK_BYTES)
        repair = self._repair()
        recorded, lists = tables.recorded(parts)
        notes = {DIGESTS_COMPUTED: repair.time} if repair.has_new_digests else {}
        written = []
        try:
            for number, rewriting in tables.rewritings(parts, notes).items():
                recorded[number] = rewriting.write(self.store, BLOCK_BYTES, digesting.memory)
                written.append(recorded[number].name)
            record = Record(
                generation=self.generation,
                files=recorded,
                index=None,
                tensors=parts.tensors,
                tree=tree_of_keys([ref.key for ref in parts.tensors]),
                world_size=max((file.rank for file in recorded), default=0) + 1,
                tensor_lists=lists,
            )
            commit_record(self.store, record, repair, tables.stored_parts(parts))
        except HoldfastError:
            remove_unfinished(self.store, written)  # nothing was committed that readers refuse
            raise

    def _repair(self) -> Repair:
        if self.columns is None and (self.tables is None or not self.tables.are_intact):
            return repair_now("record", "the data files", "computed")
        others = "the columns" if self.tables is None else "their tables"
        if self.digests_computed:
            earlier = f"the data files and {others}, whose digests were computed at {self.digests_computed}"
            return repair_now("record", earlier, "computed")
        return repair_now("record", f"the data files and {others}", "kept")

    def _refuse_damage(self, found: Digests, expected: Digests, block_bytes: int) -> None:
        wrong = np.flatnonzero(found != expected)
        if not wrong.size:
            return
        first, block = 0, int(wrong[0])
        for file in self.files if self.tables is None else self.tables.data_files():
            blocks = count_blocks(file.data_end, block_bytes)
            if block < first + blocks:
                break
            first += blocks
        path = self.store.path_of(file.name)
        raise DamagedCheckpointError(
            f"{path} is damaged from byte {(block - first) * block_bytes} on ({wrong.size} damaged block(s) in all "
            "files), so no record was made. Copy the file again from where it is intact, or load another checkpoint.",
            file=path,
            key=None,
            expected=int(expected[block]),
            found=int(found[block]),
        )

    def __str__(self) -> str:
        why = self.trouble or "nothing proves that all of its files are there; --generation makes a record anyway"
        return f"generation {self.generation}: {why}"


def _order(name: str) -> tuple[int, int]:
    """By rank, and then as its rank has numbered it: the order of files in records."""
    return rank_of(name) or 0, number_of(name)


def why_incomplete(parts: Parts) -> str:
    """What is wrong with parts of which some tensors are incomplete."""
    key, what = next(iter(parts.incomplete.items()))
    return (
        f"{len(parts.incomplete)} tensor(s) cannot be put together from the data files, such as {key!r}, which {what}"
    )
