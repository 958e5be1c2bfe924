"""The record of a checkpoint (``holdfast.json``): what it contains, sealed by a digest of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import xxhash

from holdfast._base.json_objects import are_sizes
from holdfast._base.json_parts import dumps
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.names import is_generation
from holdfast._formats.native.refs import TensorRef, TensorRefs
from holdfast._formats.native.stored_files import (
    StoredFile,
    file_row,
    files_from,
    index_from,
    tensor_lists_from,
)
from holdfast._formats.native.stored_parts import (
    MOST_RANKS,
    NO_PLACES,
    Places,
    checked_places,
    division_rows,
    divisions_from,
)
from holdfast._formats.native.tensor_rows import TensorRows, parse_record, tensor_lines, tensors_from
from holdfast.errors import UnsupportedValueError, UnsupportedVersionError

# What was rebuilt of a checkpoint, as it is noted in it (``written.repaired``), and what follows for trusting it.


REPAIRED = "repaired"
DIGESTS_COMPUTED = "digests_computed"
"""The note in columns whose digests are not those of the save."""

_NAMED = {"columns": "the columns (where chunks are stored, and digests) were", "record": "the record was"}

What = Literal["columns", "record"]
Origin = Literal["computed", "kept"]


@dataclass(frozen=True, slots=True)
class Repair:
    """A part of a checkpoint that was rebuilt."""

    what: str
    """``columns`` or ``record``."""
    time: str
    """When."""
    source: str
    """From what."""
    digests: str
    """``computed`` from the data files as they were then, or ``kept`` as they were."""

    @property
    def has_new_digests(self) -> bool:
        """Whether the digests vouch for nothing that happened before. They do not if that is not known."""
        return self.digests != "kept"

    def __str__(self) -> str:
        named = {"columns": "the columns (where chunks are stored, and digests)", "record": "the record"}.get(
            self.what, self.what
        )
        text = f"{named} of this checkpoint were rebuilt" if self.what == "columns" else f"{named} was rebuilt"
        text += f" by a repair at {self.time}, from {self.source}."
        if self.has_new_digests:
            text += (
                " The digests are of the data as it was then: damage since then is noticed, damage from before is not, "
                "and nobody can vouch for that data."
            )
        else:
            text += " The data agreed with the digests that were taken when it was saved."
        if self.what == "record":
            text += " Values, ties, metadata and tensors without elements were lost."
        return text

    def to_json(self) -> dict[str, str]:
        """As it is stored."""
        members = asdict(self)
        return {"what": members["what"], "time": members["time"], "from": members["source"], "digests": self.digests}


def noted(written: Mapping[str, Any], repair: Repair) -> dict[str, Any]:
    """How a checkpoint was written, with one more repair.

    >>> noted({"by": "me"}, Repair("columns", "2026-01-01", "the record", "computed"))["repaired"]
    [{'what': 'columns', 'time': '2026-01-01', 'from': 'the record', 'digests': 'computed'}]
    """
    before = [found.to_json() for found in repairs_in(written)]
    return {**written, REPAIRED: [*before, repair.to_json()]}


def repairs_in(written: Any) -> tuple[Repair, ...]:
    """The repairs that are noted in a checkpoint, the oldest first. Whatever is noted in another way is one too."""
    noted_there = written.get(REPAIRED) if isinstance(written, Mapping) else None
    if noted_there is None:
        return ()
    rows = noted_there if isinstance(noted_there, list) else [noted_there]
    return tuple(_repair(row if isinstance(row, Mapping) else {}) for row in rows)


def _repair(row: Mapping[str, Any]) -> Repair:
    def text(name: str, otherwise: str) -> str:
        found = row.get(name)
        return found if isinstance(found, str) else otherwise

    return Repair(
        text("what", "a part"),
        text("time", "an unknown time"),
        text("from", "the data files"),
        text("digests", "computed"),
    )


# ``docs/format.md`` describes it. Whatever passes ``decode_record`` can be used without looking twice.


FORMAT = "holdfast"
VERSION = (2, 0)
BLOCK_BYTES = 1 << 16
LARGEST_RECORD = 1 << 31
HEAD_BYTES = 1 << 18
"""So many bytes of a record have everything but its contents."""

_HEAD = re.compile(rb'\{"format":"holdfast",\n"version":\[([0-9]{1,9}),([0-9]{1,9})\],')
_WRITTEN = re.compile(rb'\n"written":(\{[^\n]*\}),\n')
_TAIL = re.compile(rb',"check":"([0-9a-f]{32})"\}\n')
_TAIL_BYTES = len(b',"check":""}\n') + 32


@dataclass(frozen=True)
class Record:
    """What a checkpoint contains, apart from where it is stored."""

    generation: str
    files: Sequence[StoredFile]
    index: StoredFile | None
    """In version 1 the columns. Later only if there are tensors that are divided by no rule."""
    tensors: Sequence[TensorRef]
    tree: Any
    """The state as a typed value, with references to tensors."""
    metadata: Any = None
    written: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    version: tuple[int, int] = VERSION
    world_size: int = 1
    places: Places = NO_PLACES
    """Who has stored what of the tensors; in version 1 the columns say it."""
    tensor_lists: Sequence[Sequence[int]] = ()
    """What tensor numbers in tables of files stand for, where they are not those of this record."""

    @cached_property
    def columns(self) -> TensorRefs:
        """The tensors as columns."""
        return TensorRefs.of(self.tensors)

    @property
    def has_tables(self) -> bool:
        """Whether data files have tables. Those of version 1 have none."""
        return self.version[0] > 1

    def file_names(self) -> list[str]:
        """The files that the checkpoint consists of, beside the record itself."""
        names = [file.name for file in self.files]
        return names if self.index is None else [self.index.name, *names]

    @property
    def nbytes(self) -> int:
        """The bytes of these files."""
        return sum(file.nbytes for file in self.files) + (0 if self.index is None else self.index.nbytes)


def encode_record(record: Record) -> bytes:
    """The bytes of a record, with a line for each member, file and tensor."""
    divisions, rank_lists = division_rows(record.places.divisions)
    lines = [
        _member("format", FORMAT),
        _member("version", list(record.version)),
        _member("generation", record.generation),
        _member("block_bytes", record.block_bytes),
        _member("written", dict(record.written)),
        _member("metadata", record.metadata),
        *([_member("world_size", record.world_size)] if record.has_tables else []),
        _table("files", map(file_row, record.files)),
    ]
    if record.tensor_lists:
        lines.append(_table("tensor_lists", map(dumps, record.tensor_lists)))
    if record.index is not None:
        index = {"name": record.index.name, "bytes": record.index.nbytes, "xxh3_128": record.index.digest}
        lines.append(_member("index", index))
    if rank_lists:
        lines.append(_table("rank_lists", rank_lists))
    if record.has_tables:
        lines.append(_table("divisions", divisions))
    places = record.places
    if not record.has_tables:
        places = Places((), [0] * len(record.tensors), [0] * len(record.tensors))
    lines += [_table("tensors", tensor_lines(record.columns, places)), _member("tree", record.tree)]
    # Escapes for all but ASCII: a str may hold what UTF-8 cannot, such as half of a surrogate pair.
    body = ("{" + ",\n".join(lines)).encode("ascii")
    if len(body) > LARGEST_RECORD - _TAIL_BYTES:
        raise UnsupportedValueError(
            f"the values and names of the state take {len(body)} bytes in the record of the checkpoint, and readers "
            f"take {LARGEST_RECORD}. Put large values into tensors or numpy arrays.",
            key="",
        )
    return body + b',"check":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def decode_record(data: bytes, source: str) -> Record:
    """Check and take apart the record ``data``. ``source`` is how errors call it."""
    members = _opened(data, source)
    version: Any = members.get("version")
    if not (are_sizes(version) and len(version) == 2):
        refuse(source, "has no version", "[major, minor]", version)
    _refuse_newer(version[0], version[1], source)
    generation, block_bytes = members.get("generation"), members.get("block_bytes")
    if not isinstance(generation, str) or not is_generation(generation):
        refuse(source, "has no generation", "16 hexadecimal digits", generation)
    if type(block_bytes) is not int or not 4096 <= block_bytes <= 1 << 30 or block_bytes & (block_bytes - 1):
        refuse(source, "has no valid block size", "a power of two from 4096 to 1073741824", block_bytes)
    written = members.get("written", {})
    if not isinstance(written, dict):
        refuse(source, "does not say how it was written", "an object", type(written).__name__)
    rows = members.get("tensors")
    if isinstance(rows, list):
        rows = TensorRows.of(rows)
    if not isinstance(rows, TensorRows):
        refuse(source, "lists no tensors", "a list", type(rows).__name__)
    tensors = tensors_from(rows, source)
    common: dict[str, Any] = {
        "generation": generation,
        "tensors": tensors,
        "tree": members.get("tree"),
        "metadata": members.get("metadata"),
        "written": written,
        "block_bytes": block_bytes,
        "version": (version[0], version[1]),
    }
    if version[0] == 1:
        files = files_from(members.get("files"), source, tables=None)
        return Record(files=files, index=index_from(members.get("index"), generation, source), **common)
    world_size = members.get("world_size")
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        refuse(source, "does not say how many ranks there were", f"1 to {MOST_RANKS}", world_size)
    lists = tensor_lists_from(members.get("tensor_lists", []), len(tensors), source)
    index = index_from(members["index"], generation, source) if "index" in members else None
    divisions = divisions_from(members.get("divisions"), members.get("rank_lists", []), world_size, source)
    places = checked_places(tensors, rows.members, divisions, source)
    if index is None and -1 in places.division_of:
        key = tensors.keys[places.division_of.index(-1)]
        refuse(source, f"names no index, which would say where {key!r} is stored", "an index", None)
    return Record(
        files=files_from(members.get("files"), source, tables=(world_size, len(lists))),
        index=index,
        world_size=world_size,
        places=places,
        tensor_lists=lists,
        **common,
    )


def written_in(head: bytes) -> Any:
    """How a checkpoint was written, from the first ``HEAD_BYTES`` of its record; None if that is unknown."""
    found = _WRITTEN.search(head)
    try:
        return None if found is None else json.loads(found.group(1))
    except (ValueError, RecursionError):
        return None


def _refuse_newer(major: int, minor: int, source: str, doubt: str = "") -> None:
    if not 1 <= major <= VERSION[0]:
        raise UnsupportedVersionError(
            f"{source} is of version {major}.{minor} of the format{doubt}, and this Holdfast reads versions up to "
            f"{VERSION[0]}. Load it with a newer Holdfast.",
            file=source,
            version=f"{major}.{minor}",
        )


def _member(name: str, value: Any) -> str:
    return f'"{name}":{dumps(value)}'


def _table(name: str, rows: Iterable[str]) -> str:
    return f'"{name}":[\n' + ",\n".join(rows) + "]"


def _opened(data: bytes, source: str) -> dict[str, Any]:
    body, tail = data[:-_TAIL_BYTES], _TAIL.fullmatch(data[-_TAIL_BYTES:])
    head = _HEAD.match(data)
    if head is not None and (tail is None or xxhash.xxh3_128_hexdigest(body) != tail.group(1).decode()):
        # A later version may seal its record in another way, but says which version it is in this one.
        _refuse_newer(int(head.group(1)), int(head.group(2)), source, ", unless it is damaged")
    if tail is None:
        refuse(source, "does not end as a record must; it is cut off or was changed", ',"check":"…"}', data[-60:])
    found = xxhash.xxh3_128_hexdigest(body)
    if found != tail.group(1).decode():
        refuse(source, "was changed after it was written: its digest differs", tail.group(1).decode(), found)
    if head is None:
        refuse(source, "does not begin as a record must", '{"format":"holdfast",', data[:60])
    return parse_record(data, source)
