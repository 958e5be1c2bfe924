"""A reader of checkpoints, written from docs/format.md alone: it shares no line and no module with Holdfast.

It takes a JSON parser, numpy and the XXH3 hash function. Whatever it finds against the specification is an
AssertionError. Values of other libraries, and of classes, stay records of what is stored.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import json
import math
import pathlib
import re
import struct
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

_SIZES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"], 1),
    **dict.fromkeys(["float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"], 1),
    **{f"{sign}int{bits}": 1 for sign in ("u", "") for bits in range(1, 8)},
    **dict.fromkeys(["uint16", "int16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["uint32", "int32", "float32", "complex32", "bcomplex32"], 4),
    **dict.fromkeys(["uint64", "int64", "float64", "complex64"], 8),
    "complex128": 16,
}
_STORED_AS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_TABLE = {
    "chunk_tensor": ("U32", "<u4"),
    "chunk_begin": ("U64", "<u8"),
    "chunk_offsets": ("U64", "<u8"),
    "chunk_sizes": ("U64", "<u8"),
    "digests": ("U32", "<u4"),
    "check": ("U8", "u1"),
}
_INDEX = {
    "part_tensor": ("U32", "<u4"),
    "part_rank": ("U32", "<u4"),
    "part_offsets": ("U64", "<u8"),
    "part_sizes": ("U64", "<u8"),
}
_COLUMNS = {
    "chunk_tensor": ("U32", "<u4"),
    "chunk_file": ("U32", "<u4"),
    "chunk_begin": ("U64", "<u8"),
    "chunk_offsets": ("U64", "<u8"),
    "chunk_sizes": ("U64", "<u8"),
    "digests": ("U32", "<u4"),
}
_FACTORIES = {type_.__name__: type_ for type_ in (bool, dict, float, int, list, set, str, tuple)}


@dataclass(eq=False)
class Tensor:
    """A stored tensor: its element type, and the bytes of its elements in an array of shape [..., size]."""

    key: str
    dtype: str
    kind: str
    rank: int | None
    numpy: Any
    raw: np.ndarray

    def array(self) -> np.ndarray:
        """Its elements, if it was a numpy array."""
        return np.frombuffer(self.raw.tobytes(), numpy_dtype(self.numpy)).reshape(self.raw.shape[:-1])


@dataclass(frozen=True)
class Other:
    """A value that Python and numpy do not have: `$` and the other members."""

    type: str
    members: dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    tensor: int
    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SpecifiedReader:
    """One checkpoint, read and checked as a whole."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.record = self._record((folder / "holdfast.json").read_bytes())
        self.version = self.record["version"][0]
        if self.version == 1:
            self.columns = self._columns()
            self.chunks = self._chunks()
            self.files = [self._data_file(number) for number in range(len(self.record["files"]))]
        else:
            self.files = [self._file_of_version_2(number) for number in range(len(self.record["files"]))]
            self.tables = [self._table(number) for number in range(len(self.files))]
            self.listed = self._listed_parts()
            self.chunks = [chunk for number in range(len(self.record["tensors"])) for chunk in self._found(number)]
            for number, (data, table) in enumerate(zip(self.files, self.tables, strict=True)):
                self._check_names(data, number, table)
        self.tensors = {entry["key"]: self._tensor(number) for number, entry in enumerate(self.record["tensors"])}
        self.state = self._value(self.record["tree"])

    def _record(self, data: bytes) -> dict[str, Any]:
        tail = re.compile(rb',"check":"([0-9a-f]{32})"\}\n').fullmatch(data[-len(b',"check":""}\n') - 32 :])
        assert tail, "the record does not end as it must"
        head = re.match(rb'\{"format":"holdfast",\n"version":\[([0-9]{1,9}),([0-9]{1,9})\],', data)
        assert head, "the record does not begin as it must"
        assert int(head[1]) in (1, 2), "of a version that this page does not describe"
        body = data[: -len(tail[0])]
        assert xxhash.xxh3_128_hexdigest(body, seed=0) == tail[1].decode(), "the record was changed"
        record = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        assert record["format"] == "holdfast"
        assert re.fullmatch("[0-9a-f]{16}", record["generation"])
        block = record["block_bytes"]
        assert 4096 <= block <= 1073741824
        assert block & (block - 1) == 0
        return record

    def _columns(self) -> dict[str, np.ndarray]:
        index = self.record["index"]
        assert index["name"] == f"index-{self.record['generation']}.safetensors"
        data = (self.folder / index["name"]).read_bytes()
        assert len(data) == index["bytes"]
        assert xxhash.xxh3_128_hexdigest(data) == index["xxh3_128"]
        return _arrays(data, _COLUMNS)

    # --- version 2: tables of data files, and parts that ranks have stored -------------------------------------

    def _file_of_version_2(self, number: int) -> bytes:
        entry = self.record["files"][number]
        assert re.fullmatch(r"data-[0-9a-f]{16}-[0-9]+-[0-9]+\.safetensors", entry["name"])
        assert 0 <= entry["rank"] < self.record["world_size"] <= 1048576
        data = (self.folder / entry["name"]).read_bytes()
        assert len(data) == entry["bytes"] == entry["table"]["begin"] + entry["table"]["bytes"]
        return data

    def _table(self, number: int) -> dict[str, Any]:
        """The chunks of a file, with the tensor numbers of the record, and the digests, which are compared."""
        entry, data, block = self.record["files"][number], self.files[number], self.record["block_bytes"]
        begin = entry["table"]["begin"]
        table = data[begin:]
        found = xxhash.xxh3_128_hexdigest(table[:-16], seed=0)
        assert found == table[-16:].hex() == entry["table"]["xxh3_128"], f"the table of {entry['name']} is damaged"
        arrays = {name: array.tolist() for name, array in _arrays(table, _TABLE).items()}
        blocks = range(0, begin, block)
        assert len(arrays["digests"]) == len(blocks)
        for position, expected in zip(blocks, arrays["digests"], strict=True):
            bytes_ = data[position : min(position + block, begin)]
            assert xxhash.xxh3_64_intdigest(bytes_, seed=0) & 0xFFFFFFFF == expected, f"{entry['name']} is damaged"
        assert arrays["chunk_tensor"] == sorted(arrays["chunk_tensor"])
        listed = self.record["tensor_lists"][entry["tensor_list"]] if "tensor_list" in entry else None
        chunks, at = [], 0
        for tensor, position in zip(arrays["chunk_tensor"], arrays["chunk_begin"], strict=True):
            stands_for = tensor if listed is None else listed[tensor]
            is_stored = stands_for >= 0
            ndim = len(self.record["tensors"][stands_for]["shape"]) if is_stored else -1 - stands_for
            offsets, sizes = (tuple(arrays[name][at : at + ndim]) for name in ("chunk_offsets", "chunk_sizes"))
            chunks.append(Chunk(stands_for, number, position, offsets, sizes))
            assert 0 not in sizes
            at += ndim
        assert at == len(arrays["chunk_offsets"]) == len(arrays["chunk_sizes"])
        stored = [chunk.tensor for chunk in chunks if chunk.tensor >= 0]
        assert entry["tensors"] == [min(stored, default=0), max(stored, default=-1)]
        return {"chunks": chunks, "names": len(chunks)}

    def _listed_parts(self) -> dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
        """The parts that the index has, by tensor number: offsets, sizes, rank."""
        if "index" not in self.record:
            return {}
        index = self.record["index"]
        assert index["name"] == f"index-{self.record['generation']}.safetensors"
        data = (self.folder / index["name"]).read_bytes()
        assert len(data) == index["bytes"]
        assert xxhash.xxh3_128_hexdigest(data) == index["xxh3_128"]
        arrays = {name: array.tolist() for name, array in _arrays(data, _INDEX).items()}
        assert arrays["part_tensor"] == sorted(arrays["part_tensor"])
        found: dict[int, list[Any]] = {}
        at = 0
        for tensor, rank in zip(arrays["part_tensor"], arrays["part_rank"], strict=True):
            ndim = len(self.record["tensors"][tensor]["shape"])
            offsets, sizes = (tuple(arrays[name][at : at + ndim]) for name in ("part_offsets", "part_sizes"))
            assert 0 not in sizes
            assert rank < self.record["world_size"]
            found.setdefault(tensor, []).append((offsets, sizes, rank))
            at += ndim
        assert at == len(arrays["part_offsets"]) == len(arrays["part_sizes"])
        return found

    def _parts(self, number: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The parts of a tensor that have elements: offsets, sizes, and the rank that has stored it."""
        entry = self.record["tensors"][number]
        if 0 in entry["shape"]:
            return []
        division = entry.get("division", 0)
        if division is None:
            return self.listed[number]
        assert number not in self.listed
        rule = self.record["divisions"][division]
        assert len(rule["cuts"]) == len(rule["steps"]) <= 64
        assert math.prod(parts for _, parts in rule["cuts"]) <= 1048576
        ranks = self.record["rank_lists"][rule["ranks"]] if "ranks" in rule else list(range(self.record["world_size"]))
        parts = [((0,) * len(entry["shape"]), tuple(entry["shape"]), entry.get("first", 0))]
        for (dim, count), step in zip(rule["cuts"], rule["steps"], strict=True):
            cut = []
            for offsets, sizes, position in parts:
                length = -(-sizes[dim] // count)
                for place in range(count):
                    at = min(place * length, sizes[dim])
                    size = min(length, sizes[dim] - at)
                    cut.append(
                        (
                            (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
                            (*sizes[:dim], size, *sizes[dim + 1 :]),
                            position + place * step,
                        )
                    )
            parts = cut
        return [(offsets, sizes, ranks[at % len(ranks)]) for offsets, sizes, at in parts if 0 not in sizes]

    def _found(self, number: int) -> list[Chunk]:
        """The chunks that count of a tensor: those inside of parts, in files of the rank that has stored the part."""
        found = []
        for offsets, sizes, rank in self._parts(number):
            for file, table in zip(self.record["files"], self.tables, strict=True):
                for chunk in table["chunks"]:
                    if file["rank"] != rank or chunk.tensor != number:
                        continue
                    sides = list(zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True))
                    if all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides):
                        assert all(b <= a and a + n <= b + m for a, n, b, m in sides), "it reaches out of its part"
                        found.append(chunk)
        return found

    # --- version 1 ----------------------------------------------------------------------------------------------

    def _chunks(self) -> list[Chunk]:
        columns = {name: array.tolist() for name, array in self.columns.items()}
        assert columns["chunk_tensor"] == sorted(columns["chunk_tensor"])
        chunks, at = [], 0
        for tensor, file, begin in zip(
            columns["chunk_tensor"], columns["chunk_file"], columns["chunk_begin"], strict=True
        ):
            ndim = len(self.record["tensors"][tensor]["shape"])
            offsets, sizes = (tuple(columns[name][at : at + ndim]) for name in ("chunk_offsets", "chunk_sizes"))
            chunks.append(Chunk(tensor, file, begin, offsets, sizes))
            at += ndim
        assert at == len(columns["chunk_offsets"]) == len(columns["chunk_sizes"])
        return chunks

    def _data_file(self, number: int) -> bytes:
        entry, block = self.record["files"][number], self.record["block_bytes"]
        pattern = rf"data-{self.record['generation']}-[0-9]+-[0-9]+\.safetensors"
        assert re.fullmatch(pattern, entry["name"])
        data = (self.folder / entry["name"]).read_bytes()
        assert len(data) == entry["bytes"]
        first = sum(-(-file["bytes"] // block) for file in self.record["files"][:number])
        for position, begin in enumerate(range(0, len(data), block)):
            found = xxhash.xxh3_64_intdigest(data[begin : begin + block], seed=0) & 0xFFFFFFFF
            assert found == self.columns["digests"][first + position], f"block {position} of {entry['name']} is damaged"
        if number == len(self.record["files"]) - 1:
            assert first + -(-len(data) // block) == len(self.columns["digests"])
        self._check_names(data, number)
        return data

    def _check_names(self, data: bytes, number: int, table: dict[str, Any] | None = None) -> None:
        """Every chunk is a tensor of the safetensors file, under the name that the page tells if it can have that."""
        header, start = _safetensors_header(data)
        assert header.pop("__metadata__")["holdfast"] == str(self.version)
        count = len([chunk for chunk in self.chunks if chunk.file == number])
        if table is not None:
            last, place = header.pop("holdfast.table"), self.record["files"][number]["table"]
            assert (last["dtype"], last["shape"]) == ("U8", [place["bytes"]])
            assert last["data_offsets"] == [place["begin"] - start, len(data) - start]
            count = table["names"]
        by_place = {tuple(entry["data_offsets"]): (name, entry) for name, entry in header.items()}
        here = [chunk for chunk in self.chunks if chunk.file == number]
        assert count == len(header)
        for chunk in here:
            tensor = self.record["tensors"][chunk.tensor]
            size = size_of(tensor["dtype"])
            begin = chunk.begin - start
            name, entry = by_place[begin, begin + math.prod(chunk.sizes) * size]
            assert entry["dtype"] == _STORED_AS.get(tensor["dtype"], "U8")
            extra = [size] if entry["dtype"] == "U8" and size != 1 else []
            assert entry["shape"] == [*chunk.sizes, *extra]
            region = ",".join(f"{at}:{at + size}" for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole = list(chunk.sizes) == tensor["shape"]
            told = tensor["key"] if whole else f"{tensor['key']}[{region}]"
            assert name == told or told in header or told in ("__metadata__", "holdfast.table") or not _is_unicode(told)

    def _tensor(self, number: int) -> Tensor:
        entry = self.record["tensors"][number]
        size = size_of(entry["dtype"])
        raw = np.zeros((*entry["shape"], size), np.uint8)
        times = np.zeros(entry["shape"], np.uint8)
        for chunk in self.chunks:
            if chunk.tensor == number:
                data = np.frombuffer(self.files[chunk.file], np.uint8, math.prod(chunk.sizes) * size, chunk.begin)
                place = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.sizes, strict=True))
                raw[place] = data.reshape(*chunk.sizes, size)
                times[place] += np.uint8(1)
        assert np.all(times == 1), f"chunks of {entry['key']} overlap or leave holes"
        assert entry["kind"] in ("sharded", "replicated", "per_rank")
        assert ("rank" in entry) == (entry["kind"] == "per_rank")
        return Tensor(entry["key"], entry["dtype"], entry["kind"], entry.get("rank"), entry.get("numpy"), raw)

    def _value(self, stored: Any) -> Any:
        if isinstance(stored, list):
            return [self._value(item) for item in stored]
        if not isinstance(stored, dict):
            return stored
        if "$" not in stored:
            return {key: self._value(value) for key, value in stored.items()}
        kind, members = stored["$"], {name: member for name, member in stored.items() if name != "$"}
        return getattr(self, "make_" + kind.replace(".", "_").lower(), self._other(kind))(**members)

    def _other(self, kind: str) -> Any:
        return lambda **members: Other(kind, {name: self._value(member) for name, member in members.items()})

    def _pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        return [(self._value(key), self._value(value)) for key, value in items]

    def make_tensor(self, key: str) -> Any:
        found = self.tensors[key]
        return found if found.numpy is None else found.array()

    def make_dict(self, items: Any) -> Any:
        return dict(self._pairs(items))

    def make_ordereddict(self, items: Any) -> Any:
        return collections.OrderedDict(self._pairs(items))

    def make_defaultdict(self, items: Any, factory: Any) -> Any:
        return collections.defaultdict(None if factory is None else _FACTORIES[factory], self._pairs(items))

    def make_counter(self, items: Any) -> Any:
        return collections.Counter(dict(self._pairs(items)))

    def make_tuple(self, items: Any) -> Any:
        return tuple(self._value(item) for item in items)

    def make_set(self, items: Any) -> Any:
        found = set(self.make_tuple(items))
        assert len(found) == len(items), "an item of a set is there twice"
        return found

    def make_frozenset(self, items: Any) -> Any:
        return frozenset(self.make_set(items))

    def make_deque(self, items: Any, maxlen: Any) -> Any:
        return collections.deque(self.make_tuple(items), maxlen)

    def make_float(self, bits: str) -> float:
        return struct.unpack(">d", bytes.fromhex(bits))[0]

    def make_int(self, hex: str) -> int:
        value = int(hex, 16)
        assert value.bit_length() >= 2048
        return value

    def make_str(self, base64: str) -> str:
        return _bytes(base64).decode("utf-8", "surrogatepass")

    def make_complex(self, real: Any, imag: Any) -> complex:
        return complex(self._value(real), self._value(imag))

    def make_bytes(self, base64: str) -> bytes:
        return _bytes(base64)

    def make_bytearray(self, base64: str) -> bytearray:
        return bytearray(_bytes(base64))

    def make_range(self, start: Any, stop: Any, step: Any) -> range:
        return range(self._value(start), self._value(stop), self._value(step))

    def make_slice(self, start: Any, stop: Any, step: Any) -> slice:
        return slice(self._value(start), self._value(stop), self._value(step))

    def make_datetime(self, iso: str, fold: int = 0) -> datetime.datetime:
        return datetime.datetime.fromisoformat(iso).replace(fold=fold)

    def make_date(self, iso: str) -> datetime.date:
        return datetime.date.fromisoformat(iso)

    def make_time(self, iso: str, fold: int = 0) -> datetime.time:
        return datetime.time.fromisoformat(iso).replace(fold=fold)

    def make_timedelta(self, days: int, seconds: int, microseconds: int) -> datetime.timedelta:
        return datetime.timedelta(days, seconds, microseconds)

    def make_decimal(self, text: str) -> decimal.Decimal:
        return decimal.Decimal(text)

    def make_uuid(self, text: str) -> uuid.UUID:
        return uuid.UUID(text)

    def make_fraction(self, numerator: Any, denominator: Any) -> fractions.Fraction:
        return fractions.Fraction(self._value(numerator), self._value(denominator))

    def make_path(self, text: Any) -> pathlib.Path:
        return pathlib.Path(self._value(text))

    def make_pureposixpath(self, text: Any) -> pathlib.PurePosixPath:
        return pathlib.PurePosixPath(self._value(text))

    def make_purewindowspath(self, text: Any) -> pathlib.PureWindowsPath:
        return pathlib.PureWindowsPath(self._value(text))

    def make_numpy_dtype(self, numpy: Any) -> np.dtype:
        return numpy_dtype(numpy)

    def make_numpy_scalar(self, numpy: Any, base64: str) -> Any:
        dtype = numpy_dtype(numpy)
        value = np.frombuffer(_bytes(base64), dtype)[0]
        return np.void(_bytes(base64), dtype) if isinstance(value, np.void) else value

    def make_numpy_array(self, numpy: Any, shape: list[int], base64: str) -> np.ndarray:
        return np.frombuffer(_bytes(base64), numpy_dtype(numpy)).reshape(shape)


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    if dtype.startswith("raw"):
        assert 1 <= int(dtype[3:]) <= 1048576
        return int(dtype[3:])
    return _SIZES[dtype]


def numpy_dtype(stored: Any) -> np.dtype:
    """A numpy dtype from its text, or from the list of its fields."""
    if isinstance(stored, str):
        return np.dtype(stored)
    names, formats, offsets, titles, position = [], [], [], [], 0
    for name, kind, *shape in stored:
        field = np.dtype((numpy_dtype(kind), tuple(shape[0]) if shape else ()))
        if name != "":  # otherwise it is a gap
            titles.append(name[0] if isinstance(name, list) else None)
            names.append(name[1] if isinstance(name, list) else name)
            formats.append(field)
            offsets.append(position)
        position += field.itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "titles": titles, "itemsize": position})


def _safetensors_header(data: bytes) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique), 8 + length


def _arrays(data: bytes, wanted: dict[str, tuple[str, str]]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file."""
    header, start = _safetensors_header(data)
    arrays = {}
    for name, (stored_as, dtype) in wanted.items():
        entry = header[name]
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[start + begin : start + end], dtype)
        assert entry["dtype"] == stored_as
        assert entry["shape"] == [arrays[name].size]
    return arrays


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), "a member is there twice"
    return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
