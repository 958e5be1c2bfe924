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
        self.columns = self._columns()
        self.chunks = self._chunks()
        self.files = [self._data_file(number) for number in range(len(self.record["files"]))]
        self.tensors = {entry["key"]: self._tensor(number) for number, entry in enumerate(self.record["tensors"])}
        self.state = self._value(self.record["tree"])

    def _record(self, data: bytes) -> dict[str, Any]:
        tail = re.compile(rb',"check":"([0-9a-f]{32})"\}\n').fullmatch(data[-len(b',"check":""}\n') - 32 :])
        assert tail, "the record does not end as it must"
        head = re.match(rb'\{"format":"holdfast",\n"version":\[([0-9]{1,9}),([0-9]{1,9})\],', data)
        assert head, "the record does not begin as it must"
        assert int(head[1]) == 1, "of a version that this page does not describe"
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
        header, start = _safetensors_header(data)
        arrays = {}
        for name, (stored_as, dtype) in _COLUMNS.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            arrays[name] = np.frombuffer(data[start + begin : start + end], dtype)
            assert entry["dtype"] == stored_as
            assert entry["shape"] == [arrays[name].size]
        return arrays

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

    def _check_names(self, data: bytes, number: int) -> None:
        """Every chunk is a tensor of the safetensors file, under the name that the page tells if it can have that."""
        header, start = _safetensors_header(data)
        header.pop("__metadata__", None)
        by_place = {tuple(entry["data_offsets"]): (name, entry) for name, entry in header.items()}
        here = [chunk for chunk in self.chunks if chunk.file == number]
        assert len(here) == len(header)
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
            assert name == told or told in header or told == "__metadata__" or not _is_unicode(told)

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
