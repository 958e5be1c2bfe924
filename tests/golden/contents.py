"""What the golden checkpoints contain. Never changed: checkpoints that exist cannot change either."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import struct
import uuid
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from tests.sharding import dtensor_of

WORLD_SIZE = 4
METADATA = {"note": "golden", "step": 7, "nested": {"list": [1, 2.5, None, True, "ü"]}}
MOST_BYTES_IN_A_FILE = 200

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
]
DTYPES_HERE = [name for name in DTYPES if hasattr(torch, name)]
"""Those that the installed torch has."""


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Config:
    rate: float
    layers: Any


Point = collections.namedtuple("Point", ["x", "y"])

holdfast.register_type(Color, name="golden:Color")
holdfast.register_type(Access, name="golden:Access")
holdfast.register_type(Config, name="golden:Config")
holdfast.register_type(Point, name="golden:Point")


def tensors() -> dict[str, torch.Tensor]:
    """A tensor of every element type, of bits that say something in most of them, and some of odd shapes."""
    bits = torch.arange(96, dtype=torch.uint8) * 37 + 11
    found = {name: bits.view(getattr(torch, name)).reshape(2, -1) for name in DTYPES_HERE if name != "bool"}
    found["bool"] = (bits % 3 == 0).reshape(2, -1)
    found["no dimensions"] = torch.tensor(-1.5)
    found["no elements"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    found["transposed"] = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    found["__metadata__"] = torch.tensor([1, 2], dtype=torch.int32)
    found["ü.\ud800"] = torch.tensor([3], dtype=torch.uint8)
    return found


def arrays() -> dict[str, np.ndarray]:
    """A numpy array of every kind."""
    fields = [("a", "u1"), ("b", "<f8"), ("c", "<i2", (2, 3)), ("d", [("e", "<f4"), ("f", "S3")])]
    kinds = ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"]
    found: dict[str, np.ndarray] = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    found["big-endian"] = np.arange(5, dtype=">i4")
    found["moments"] = np.array(["2026-01-02T03:04:05", "NaT"], dtype="<M8[ns]")
    found["durations"] = np.array([1, -2], dtype="<m8[s]")
    found["bytes"] = np.array([b"abc", b"d"], dtype="S3")
    found["texts"] = np.array(["aä", "€"], dtype="<U2")
    found["fields"] = np.frombuffer(bytes(range(2 * np.dtype(fields).itemsize)), fields).copy()
    aligned = np.dtype([("x", "u1"), ("y", "<f8"), ("z", "u1")], align=True)
    found["aligned"] = np.zeros(3, aligned)
    for number, name in enumerate(aligned.names):
        found["aligned"][name] = np.arange(3) + 10 * number
    found["no dimensions"] = np.array(2.5)
    found["no elements"] = np.empty((0, 4), "<f4")
    found["of columns"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    return found


def values() -> dict[Any, Any]:
    """A value of every type of the format."""
    return {
        "null": None,
        "truths": [True, False],
        "ints": [0, -1, 2**63, -(2**70), 2**2047 - 1, 2**2048, -(3**2000)],
        "floats": [0.0, -0.0, 0.1, 1e300, 5e-324, -2.5],
        "strange floats": [float("inf"), float("-inf"), float("nan"), payload(0x7FF0_0000_0000_0001)],
        "texts": ["", "plain", "ü€😀", 'a "quote" \\ \n \x00', "\ud800 alone"],
        "list": [1, [2, [3]], []],
        "tuple": (1, (2, "x"), ()),
        "dict": {"a": {"b": {}}, "$": "dollar"},
        "dict of any keys": {1: "int", 1.5: "float", None: "none", (1, 2): "tuple", b"k": "bytes", "s": "text"},
        "OrderedDict": collections.OrderedDict([("z", 1), ("a", 2)]),
        "defaultdict": collections.defaultdict(list, {"k": [1]}),
        "defaultdict without": collections.defaultdict(None, {1: 2}),
        "Counter": collections.Counter("hello"),
        "set": {1, "a", (2, 3), None},
        "frozenset": frozenset([b"x", 2.5]),
        "deque": collections.deque([1, np.arange(3, dtype="<i2")], maxlen=5),
        "deque without end": collections.deque(),
        "complex": [1 + 2j, complex(-0.0, float("nan"))],
        "bytes": [b"", b"\x00\xff", bytearray(b"ba")],
        "range": range(2, 20, 3),
        "slice": slice(None, 5, -1),
        "datetime": [
            datetime.datetime(2026, 1, 2, 3, 4, 5, 678),
            datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))),
            datetime.datetime(2026, 10, 25, 2, 30, fold=1),
        ],
        "date": datetime.date(2026, 2, 3),
        "time": [datetime.time(1, 2, 3, 4), datetime.time(1, 2, fold=1, tzinfo=datetime.timezone.utc)],
        "timedelta": datetime.timedelta(-1, 5, 7),
        "Decimal": [decimal.Decimal("1.10"), decimal.Decimal("-Infinity"), decimal.Decimal("NaN")],
        "UUID": uuid.UUID(int=2**127 + 5),
        "Fraction": fractions.Fraction(-7, 3),
        "Path": pathlib.Path("a/b"),
        "PurePosixPath": pathlib.PurePosixPath("/x\udcff"),
        "PureWindowsPath": pathlib.PureWindowsPath(r"C:\x"),
        "torch.Size": torch.Size([2, 3]),
        "torch.dtype": [torch.bfloat16, torch.float8_e5m2],
        "torch.device": [torch.device("cpu"), torch.device("cuda:1")],
        "torch.layout": torch.strided,
        "torch.memory_format": torch.channels_last,
        "numpy.dtype": [np.dtype(">f4"), np.dtype([("a", "u1"), ("b", "<f8", (2,))])],
        "numpy.scalar": [
            *(np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1j), np.float64(2.5)),
            *(np.datetime64("2026-01-01", "D"), np.str_("aé"), np.bytes_(b"xy")),
        ],
        "enum": [Color.BLUE, Access.READ | Access.WRITE],
        "dataclass": Config(0.1, layers=[1, {"t": torch.tensor([4, 5])}]),
        "namedtuple": Point(1, torch.tensor([6.0])),
    }


def payload(bits: int) -> float:
    """A float of these bits: one of the many that are not numbers."""
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def everything() -> dict[str, Any]:
    """What one rank saved: every element type, every type of value, and tied weights."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "tensors": tensors(),
        "arrays": arrays(),
        "values": values(),
        "tied": [weight, {"again": weight}],
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "pickled": PICKLED,
    }


PICKLED = complex
"""The class itself: the format has no place for it."""


def whole_tensors() -> dict[str, torch.Tensor]:
    """What four ranks saved parts of, in full."""
    return {
        "rows": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "columns": torch.arange(30, dtype=torch.int16).reshape(5, 6),
        "blocks": torch.arange(77, dtype=torch.float64).reshape(7, 11).to(torch.bfloat16),
        "few rows": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "copies": torch.arange(4.0).to(torch.complex64),
    }


def sharded(rank: int) -> dict[str, Any]:
    """What each of four ranks gave to save."""
    line = DeviceMesh("cpu", list(range(WORLD_SIZE)))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    layouts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "blocks": (square, [Shard(0), Shard(1)]),
        "few rows": (line, [Shard(0)]),
        "copies": (line, [Replicate()]),
    }
    parts: dict[str, DTensor] = {name: dtensor_of(tensor, *layouts[name]) for name, tensor in whole_tensors().items()}
    return {
        "model": {**parts, "tied": parts["rows"]},
        "plain": torch.arange(3, dtype=torch.int64),
        "step": 12,
        "own": holdfast.PerRank(own_state(rank)),
    }


def own_state(rank: int) -> dict[str, Any]:
    """What every rank has of its own."""
    return {"position": rank * 100, "random": torch.full((rank + 1,), rank, dtype=torch.uint8)}


def sharded_as_read() -> dict[str, Any]:
    """The same, as a program without ranks reads it."""
    model = whole_tensors()
    return {
        "model": {**model, "tied": model["rows"]},
        "plain": torch.arange(3, dtype=torch.int64),
        "step": 12,
        "own": [own_state(rank) for rank in range(WORLD_SIZE)],
    }


def in_many_files() -> dict[str, Any]:
    """What was cut into files of ``MOST_BYTES_IN_A_FILE``."""
    return {
        "large": torch.arange(90, dtype=torch.int32).reshape(3, 5, 6),
        "wide": torch.arange(40, dtype=torch.float64).reshape(1, 40),
        "small": {str(number): torch.tensor([number], dtype=torch.int16) for number in range(5)},
    }
