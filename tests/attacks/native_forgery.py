"""Checkpoints of version 1 with a record and columns of the attacker's choice, and digests that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

TYPES = {"u4": "U32", "u8": "U64", "i8": "I64", "f4": "F32", "u1": "U8"}


class Forgery:
    """The parts of a checkpoint, to be changed and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / "holdfast.json").read_bytes())
        del self.record["check"]
        self.columns = arrays_in((folder / self.record["index"]["name"]).read_bytes())
        self.replaced: dict[str, str] = {}

    def write(self) -> None:
        """Put it back, with the right digests."""
        index = safetensors_file(self.columns)
        if isinstance(self.record.get("index"), dict) and "keep" not in self.record["index"]:
            name = self.record["index"]["name"]
            self.record["index"].update(bytes=len(index), xxh3_128=xxhash.xxh3_128_hexdigest(index))
            if isinstance(name, str) and "/" not in name:
                (self.folder / name).write_bytes(index)
        text = record_as_written(self.record)
        for old, new in self.replaced.items():
            assert old in text
            text = text.replace(old, new)
        self.write_body(text.encode())

    def write_body(self, body: bytes) -> None:
        """A record with this body, which lacks its last brace, and the digest of it."""
        check = b',"check":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
        (self.folder / "holdfast.json").write_bytes(body + check)


def safetensors_file(arrays: dict[str, np.ndarray]) -> bytes:
    """A safetensors file of arrays in one or more dimensions."""
    header, data = {}, b""
    for name, array in arrays.items():
        content = array.tobytes()
        header[name] = {
            "dtype": TYPES[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def arrays_in(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    types = {stored: dtype for dtype, stored in TYPES.items()}
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], f"<{types[entry['dtype']]}").copy()
        for name, entry in header.items()
    }


def record_as_written(record: dict[str, Any]) -> str:
    """The body of a record, without its last brace."""
    members = [f'"{name}":{json.dumps(value, separators=(",", ":"))}' for name, value in record.items()]
    return "{" + ",\n".join(members)
