"""Writes the columns and the record of a checkpoint whose data files are there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np

from holdfast.formats.native.blocks import Digests, count_blocks, digest_blocks
from holdfast.formats.native.columns import Columns, decode_columns, digest_of, encode_columns, first_blocks
from holdfast.formats.native.names import RECORD
from holdfast.formats.native.readable_files import OpenFiles, ReadableFile
from holdfast.formats.native.reading import read_size
from holdfast.formats.native.record import Record, StoredFile, encode_record
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.repairs import DIGESTS_COMPUTED, Origin, Repair, What, noted
from holdfast.inspecting.working import work_through
from holdfast.progress import OnProgress, Tally
from holdfast.repairing.data_files import Part, Parts
from holdfast.repairing.kept import keep_copy
from holdfast.stores.store import Store
from holdfast.tuning import MEMORY_BUDGET, MEMORY_OF_A_READER, READERS


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
        pieces = [(number, begin) for number, file in enumerate(files) for begin in range(0, file.nbytes, size)]
        tally = Tally(sum(file.nbytes for file in files), self.on_progress)
        own = threading.local()

        def digest(piece: tuple[int, int]) -> None:
            number, begin = piece
            if not hasattr(own, "buffer"):
                own.buffer = memoryview(bytearray(size))
            part = own.buffer[: min(size, files[number].nbytes - begin)]
            with opened.using(number) as reader:
                reader.read_into(begin, part)
            first = starts[number] + begin // block_bytes
            found[first : first + count_blocks(len(part), block_bytes)] = digest_blocks(part, block_bytes)
            tally.add(len(part))

        readable = [ReadableFile(file.name, file.nbytes, partial(store.reader, file.name), None) for file in files]
        threads = (MEMORY_BUDGET if self.memory is None else self.memory) // (MEMORY_OF_A_READER * size)
        with closing(OpenFiles(readable, (number for number, _ in pieces))) as opened:
            work_through(pieces, digest, max(1, min(READERS, threads)))
        return found


def put_in_place(store: Store, record: Record, parts: Parts, digests: Digests, repair: Repair) -> None:
    """Write the columns and commit the record, which tells of the repair. What was there before is kept, renamed."""
    record = replace(record, written=noted(record.written, repair))
    notes = {DIGESTS_COMPUTED: repair.time} if repair.has_new_digests else {}
    content = encode_columns(_columns(record.tensors, parts.parts, digests), notes)
    index = StoredFile(record.index.name, len(content), digest_of(content))
    finished = replace(record, index=index)
    decode_columns(content, finished, store.path_of(index.name))  # nothing is put in place that readers would refuse
    encoded = encode_record(finished)
    old_index, old_record = keep_copy(store, index.name), keep_copy(store, RECORD)
    store.commit(index.name, content, replaces=old_index)
    store.sync()
    store.commit(RECORD, encoded, replaces=old_record)


def _columns(tensors: Sequence[TensorRef], parts: Mapping[str, Sequence[Part]], digests: Digests) -> Columns:
    rows = [
        (number, part)
        for number, ref in enumerate(tensors)
        for part in sorted(parts.get(ref.key, ()), key=lambda part: part.offsets)
        if 0 not in part.sizes
    ]

    def column(values: Iterable[int]) -> Any:
        return np.array(list(values), dtype=np.int64)

    return Columns(
        chunk_tensor=column(number for number, _ in rows),
        chunk_file=column(part.file for _, part in rows),
        chunk_begin=column(part.begin for _, part in rows),
        chunk_offsets=column(offset for _, part in rows for offset in part.offsets),
        chunk_sizes=column(size for _, part in rows for size in part.sizes),
        digests=digests,
    )


def repair_now(what: What, source: str, digests: Origin) -> Repair:
    """The note of a repair that is made now."""
    return Repair(what, datetime.now(timezone.utc).isoformat(timespec="seconds"), source, digests)
