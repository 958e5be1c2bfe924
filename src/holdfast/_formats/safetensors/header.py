"""The header of a safetensors file: what is in the file, and where.

A file is 8 bytes with the length of the header, the header (JSON, padded with spaces), and the data. The data of the
tensors has no holes or overlaps and ends with the file; a header that says anything else is refused, so that what
passes here can be read without looking twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from holdfast._base.json_objects import are_sizes, parse_json_object
from holdfast._formats.safetensors.dtypes import BITS, nbytes
from holdfast.errors import DamagedCheckpointError

METADATA_KEY = "__metadata__"
LENGTH_BYTES = 8
MAX_LENGTH = 100_000_000
"""Longer headers are refused, here as in other readers of the format: they would be an attack, or damage."""

_ALIGNMENT = 8
_MOST_DIMENSIONS = 64
"""More than any library has; the sizes of more would multiply to numbers that take seconds to compute."""
_FIELDS = {"dtype", "shape", "data_offsets"}


class ByteSource(Protocol):
    """A stream that can be read at any place."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place; returns where that is."""


@dataclass(frozen=True)
class HeaderTensor:
    """A tensor of a file: what it is, and its bytes ``begin`` to ``end``, counted from the beginning of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The tensors of a file in the order in which they are stored, free-form notes, and where the data begins."""

    tensors: Mapping[str, HeaderTensor]
    notes: Mapping[str, str]
    data_start: int
    digest: bytes
    """Of the header as it stands in the file: files with different headers are different files."""

    def position(self, name: str) -> int:
        """Where in the file a tensor begins."""
        return self.data_start + self.tensors[name].begin


def plan_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], notes: Mapping[str, str] | None = None
) -> tuple[Header, bytes]:
    """Lay out a file for tensors given as name, dtype and shape. Returns its header, and the bytes that it begins with.

    Tensors of large elements come first, so that each begins at a multiple of its element size.

    >>> header, start = plan_header([("bias", "U8", (3,)), ("weight", "F32", (2, 2))], {"format": "pt"})
    >>> list(header.tensors), header.position("bias") == len(start) + 16
    (['weight', 'bias'], True)
    """
    placed: dict[str, HeaderTensor] = {}
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-BITS[tensor[1]], tensor[0])):
        size = nbytes(dtype, shape)
        if name == METADATA_KEY or name in placed:
            raise ValueError(f"a safetensors file cannot hold a tensor under the name {name!r} (again)")
        if size is None:
            raise ValueError(f"{name!r}: {dtype} elements of shape {list(shape)} do not fill whole bytes")
        placed[name] = HeaderTensor(dtype, tuple(shape), position, position + size)
        position += size
    content: dict[str, Any] = {METADATA_KEY: dict(notes)} if notes else {}
    for name, tensor in placed.items():
        content[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"the header of {len(placed)} tensors takes {len(text)} bytes, and readers take {MAX_LENGTH} at most; "
            "spread the tensors over more files"
        )
    start = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return Header(placed, dict(notes or {}), len(start), _digest(text)), start


def read_header(stream: ByteSource, source: str) -> Header:
    """Read and check the header of the file ``source``, opened as ``stream``."""
    text, file_size = read_header_text(stream, source)
    return decode_header(text, file_size, source)


def read_digest(stream: ByteSource, source: str) -> bytes:
    """The digest of a file's header, without a look at what it says."""
    return _digest(read_header_text(stream, source)[0])


def read_header_text(stream: ByteSource, source: str) -> tuple[bytes, int]:
    """The header of a file as it stands there, of a length that was checked, and the size of the file."""
    file_size = stream.seek(0, 2)
    stream.seek(0)
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    if file_size < LENGTH_BYTES or length > file_size - LENGTH_BYTES:
        _refuse(source, None, "is cut off inside of its header", LENGTH_BYTES + length, file_size)
    if length > MAX_LENGTH:
        _refuse(source, None, "has a header that is too large", MAX_LENGTH, length)
    return stream.read(length), file_size


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def decode_header(text: bytes, file_size: int, source: str) -> Header:
    """Check the header of a file of ``file_size`` bytes. ``source`` is how errors call the file."""
    content = _parse(text, source)
    notes = content.pop(METADATA_KEY, None)
    if notes is None:
        notes = {}
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        _refuse(source, METADATA_KEY, "has metadata that is not str", "str", type(notes).__name__)
    tensors = {name: _tensor(name, entry, source) for name, entry in content.items()}
    ordered = dict(sorted(tensors.items(), key=lambda tensor: (tensor[1].begin, tensor[1].end)))
    position = 0
    for name, tensor in ordered.items():
        if tensor.begin != position:
            kind = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            _refuse(source, name, kind, position, tensor.begin)
        position = tensor.end
    data_start = LENGTH_BYTES + len(text)
    if data_start + position != file_size:
        last = next(reversed(ordered), None)
        kind = "is cut off" if file_size < data_start + position else "has more data than its header says"
        _refuse(source, last, kind, data_start + position, file_size)
    return Header(ordered, notes, data_start, _digest(text))


def _parse(text: bytes, source: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(source, None, "is not a safetensors file: its header does not begin with a brace", b"{", text[:1])
    return parse_json_object(text, source, "its header")


def _tensor(name: str, entry: Any, source: str) -> HeaderTensor:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        _refuse(source, name, "is not described as a tensor", sorted(_FIELDS), found)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(source, name, "has an unknown dtype", sorted(BITS), dtype)
    if not are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        _refuse(source, name, "has no valid shape", f"up to {_MOST_DIMENSIONS} numbers that are not negative", shape)
    if not are_sizes(offsets) or len(offsets) != 2:
        _refuse(source, name, "has no valid offsets", "two numbers that are not negative", offsets)
    size = nbytes(dtype, shape)
    if size is None or offsets[1] - offsets[0] != size:
        _refuse(source, name, f"has the wrong number of bytes for {dtype} {shape}", size, offsets[1] - offsets[0])
    return HeaderTensor(dtype, tuple(shape), *offsets)


def _refuse(source: str, key: str | None, what: str, expected: Any, found: Any) -> NoReturn:
    subject = source if key is None else f"{source}: {key!r}"
    raise DamagedCheckpointError(
        f"{subject} {what} (expected {expected}, found {found!s:.200}). Copy the file again, or load another one.",
        file=source,
        key=key,
        expected=expected,
        found=found,
    )
