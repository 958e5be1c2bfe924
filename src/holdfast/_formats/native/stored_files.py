"""The files of a checkpoint, as its record lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast._base.json_objects import are_sizes
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.names import generation_of, index_file, rank_of

LARGEST_FILE = 1 << 62
MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where in a data file its table is, and which tensors it is about."""

    begin: int
    nbytes: int
    digest: str
    """Of all but its last 16 bytes, which are the same."""
    first: int = 0
    """The smallest tensor number in it."""
    last: int = -1
    """The largest one; smaller than the first if there is none."""
    tensor_list: int | None = None
    """Which of the record's lists says what tensor numbers in the table stand for; None if they are the record's."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint. It is also what a rank reports of a file that it has written, so its size is bounded."""

    name: str
    nbytes: int
    digest: str = ""
    """Of the whole file; only the index has one, data files have digests of blocks."""
    rank: int = 0
    """Who wrote it."""
    table: TablePlace | None = None
    """None in version 1 of the format, where the columns have it all."""

    @property
    def data_end(self) -> int:
        """Where the bytes end that digests of blocks are of."""
        return self.nbytes if self.table is None else self.table.begin


def file_row(file: StoredFile) -> str:
    """What a record says of a data file. The parts of its name need no escapes."""
    if file.table is None:
        return f'{{"name":"{file.name}","bytes":{file.nbytes}}}'
    begin, nbytes, digest = file.table.begin, file.table.nbytes, file.table.digest
    listed = "" if file.table.tensor_list is None else f',"tensor_list":{file.table.tensor_list}'
    return (
        f'{{"name":"{file.name}","bytes":{file.nbytes},"rank":{file.rank},'
        f'"table":{{"begin":{begin},"bytes":{nbytes},"xxh3_128":"{digest}"}},'
        f'"tensors":[{file.table.first},{file.table.last}]{listed}}}'
    )


def files_from(rows: Any, source: str, *, tables: tuple[int, int] | None) -> list[StoredFile]:
    """The data files that a record lists. ``tables`` has the number of ranks and that of tensor lists, which files of
    version 2 refer to."""
    if not isinstance(rows, list):
        refuse(source, "lists no files", "a list", type(rows).__name__)
    files = [_file(row, source) if tables is None else _with_table(row, *tables, source) for row in rows]
    for file in files:
        if generation_of(file.name) is None or not file.name.startswith("data-"):
            refuse(source, "lists a file whose name is not that of a data file", "data-…", file.name)
    names = {file.name for file in files}
    if len(names) < len(files):
        refuse(source, "lists a file twice", "each file once", len(files) - len(names))
    return files


def index_from(row: Any, generation: str, source: str) -> StoredFile:
    """The index; in version 1, the file with the columns."""
    file = _file(row, source)
    digest = row.get("xxh3_128")
    if file.name != index_file(generation):
        refuse(source, "names the index of another save", index_file(generation), file.name)
    if not isinstance(digest, str):
        refuse(source, "has no digest of the index", "32 hexadecimal digits", digest)
    return StoredFile(file.name, file.nbytes, digest)


def _file(row: Any, source: str) -> StoredFile:
    if not isinstance(row, dict):
        refuse(source, "lists a file in a wrong way", "an object", row)
    name: Any = row.get("name")
    nbytes: Any = row.get("bytes")
    if not isinstance(name, str) or type(nbytes) is not int or not 0 <= nbytes <= LARGEST_FILE:
        refuse(source, "lists a file in a wrong way", "a name and a number of bytes", row)
    return StoredFile(name, nbytes, rank=rank_of(name) or 0)


def _with_table(row: Any, world_size: int, list_count: int, source: str) -> StoredFile:
    file = _file(row, source)
    rank, table, tensors = row.get("rank"), row.get("table"), row.get("tensors")
    if type(rank) is not int or not 0 <= rank < world_size:
        refuse(source, f"does not say which rank wrote {file.name}", f"a number below {world_size}", rank)
    if not isinstance(table, dict) or not are_sizes([table.get("begin"), table.get("bytes")]):
        refuse(source, f"does not say where the table of {file.name} is", "begin, bytes and xxh3_128", table)
    begin, nbytes, digest = table["begin"], table["bytes"], table.get("xxh3_128")
    if begin + nbytes != file.nbytes:
        refuse(source, f"has a table of {file.name} that does not end with it", file.nbytes, begin + nbytes)
    if not isinstance(digest, str):
        refuse(source, f"has no digest of the table of {file.name}", "32 hexadecimal digits", digest)
    if not isinstance(tensors, list) or len(tensors) != 2 or not all(type(number) is int for number in tensors):
        refuse(source, f"does not say which tensors are in {file.name}", "[first, last]", tensors)
    listed = row.get("tensor_list")
    if listed is not None and not (type(listed) is int and 0 <= listed < list_count):
        refuse(source, f"refers to an unknown list of tensors for {file.name}", f"below {list_count}", listed)
    return StoredFile(
        file.name, file.nbytes, rank=rank, table=TablePlace(begin, nbytes, digest, tensors[0], tensors[1], listed)
    )


def tensor_lists_from(rows: Any, tensor_count: int, source: str) -> list[list[int]]:
    """What tensor numbers in tables stand for, list by list."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        refuse(source, "has no lists of tensor numbers", "a list of lists", type(rows).__name__)
    for row in rows:
        if not all(type(number) is int and -1 - MOST_DIMENSIONS <= number < tensor_count for number in row):
            refuse(source, "has unknown tensors in a list", f"numbers below {tensor_count}", row)
    return rows
