"""Checkpoints of version 1 of the format, which nothing but this and the golden ones makes any more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from holdfast._formats.native.blocks import digest_blocks
from holdfast._formats.native.columns import digest_of, encode_columns
from holdfast._formats.native.names import RECORD, index_file
from holdfast._formats.native.record import encode_record
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.stored_parts import NO_PLACES
from holdfast._stores.local_store import LocalStore
from tests.native_files import table_begin


def make_version_1(folder: Path) -> None:
    """Let the checkpoint in a folder be of version 1: data files without tables, and columns."""
    source = NativeSource(LocalStore(folder))
    record, columns = source.record, source.columns
    files, digests = [], [np.zeros(0, np.uint32)]
    for file in record.files:
        content = _without_table((folder / file.name).read_bytes())
        (folder / file.name).write_bytes(content)
        files.append(StoredFile(file.name, len(content), rank=file.rank))
        digests.append(digest_blocks(content, record.block_bytes))
    data = encode_columns(replace(columns, digests=np.concatenate(digests)))
    index = StoredFile(index_file(record.generation), len(data), digest_of(data))
    (folder / index.name).write_bytes(data)
    old = replace(record, files=files, index=index, version=(1, 0), tensor_lists=(), places=NO_PLACES)
    (folder / RECORD).write_bytes(encode_record(old))


def _without_table(content: bytes) -> bytes:
    """A data file without its table. The other tensors stay where they are."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = table_begin(content)
    del header["holdfast.table"]
    header["__metadata__"]["holdfast"] = "1"
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return content[:8] + text.ljust(length) + content[8 + length : end]
