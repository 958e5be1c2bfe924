"""Random states of all that can be stored, and what it means that two of them are exactly the same."""

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
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

import holdfast
from tests.dcp.states import bits, of_bytes


@holdfast.register_type
class Color(enum.Enum):
    RED = 1
    BLUE = 2


@holdfast.register_type
class Pair(NamedTuple):
    first: Any
    second: Any


@holdfast.register_type
@dataclasses.dataclass
class Settings:
    rate: Any
    buffer: Any


# --- values ----------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=[]), max_size=5)
numbers = st.integers() | st.integers(-(2**3000), 2**3000) | st.floats() | st.complex_numbers()
plain_values = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)),
    st.dates(),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.sampled_from([*Color, pathlib.PurePosixPath("a/b"), torch.Size([2, 3]), torch.float8_e5m2, torch.device("cpu")]),
    st.sampled_from(
        [np.float32(-0.0), np.int64(3), np.datetime64("2026-01-01", "ns"), np.dtype(">f4"), np.bool_(True)]
    ),
    st.frozensets(st.integers() | st.text(max_size=3), max_size=3),
    st.sets(st.integers() | st.booleans(), max_size=3),
    st.lists(st.integers(), max_size=3).map(lambda items: collections.deque(items, maxlen=4)),
)
dict_keys = st.one_of(
    texts,
    st.sampled_from(["a", "b", "a.b", "0", "[", "$", "params", "état", ""]),
    st.integers(-3, 3),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
)

# --- tensors and arrays ----------------------------------------------------------------------------------------------

TORCH_DTYPES = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and f"torch.{name}" == str(dtype) and not name.startswith(("q", "bits"))
]
NUMPY_DTYPES = [
    "?",
    "<i1",
    "<u2",
    ">i4",
    "<f2",
    "<f8",
    ">c8",
    "<c16",
    "<M8[ns]",
    "<m8[s]",
    "<U3",
    "S2",
    "V5",
    "<f2,>i8",
]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(shapes)
    size = int(np.prod(shape)) * dtype.itemsize
    tensor = of_bytes(
        torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8), dtype, shape
    )
    change = draw(st.sampled_from(["", "transposed", "reversed", "sliced", "expanded", "conjugated"]))
    if change == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1)
    if change == "sliced" and tensor.dim():
        return tensor[tensor.shape[0] // 2 :]
    if change == "expanded" and tensor.dim():
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if change == "conjugated" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(shapes)
    size = int(np.prod(shape)) * dtype.itemsize
    letters = dtype.kind in "US"
    content = b"\0" * size if letters else draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        content = bytes(byte & 1 for byte in content)
    array = np.frombuffer(content, dtype).reshape(shape) if size else np.empty(shape, dtype)
    if letters:
        array = np.full(shape, "xy", dtype)
    change = draw(st.sampled_from(["", "transposed", "sliced", "reversed"]))
    if change == "transposed":
        return array.T
    if change == "sliced" and array.ndim:
        return array[::2]
    if change == "reversed" and array.ndim:
        return array[::-1]
    return array


# --- states ----------------------------------------------------------------------------------------------------------


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(dict_keys, inner, max_size=4)
    return st.one_of(
        dicts,
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Settings, inner, inner),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(collections.Counter),
    )


class Drawn:
    """A random state. Torch cannot print all its dtypes, so this does it for failing tests."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def __repr__(self) -> str:
        return _printed(self.state)


def _printed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {tuple(value.shape)} {value.stride()} {bits(value)!r}>"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{key!r}: {_printed(child)}' for key, child in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_printed, value))})"
    return _printed(vars(value)) if isinstance(value, Settings) else repr(value)


class Shared(NamedTuple):
    """Stands for a tensor that is at several places of a state."""

    number: int


_shared = st.builds(Shared, st.integers(0, 2))
_values = st.recursive(st.one_of(plain_values, tensors(), arrays(), _shared, _shared), _containers, max_leaves=8)


@st.composite
def states(draw: st.DrawFn) -> Drawn:
    """A random state, with tensors that are at several places of it."""
    pool = draw(st.lists(tensors() | arrays(), min_size=3, max_size=3))
    state = draw(st.dictionaries(dict_keys, _values, min_size=1, max_size=5))
    return Drawn(_with_shared(state, pool))


def _with_shared(value: Any, pool: list[Any]) -> Any:
    if isinstance(value, Shared):
        return pool[value.number]
    if isinstance(value, dict):
        for key, child in value.items():
            value[key] = _with_shared(child, pool)
    elif type(value) in (list, tuple):
        return type(value)(_with_shared(child, pool) for child in value)
    elif isinstance(value, (Pair, Settings)):
        return type(value)(*(_with_shared(getattr(value, name), pool) for name in type(value).__annotations__))
    return value


def blank_copy(value: Any, made: dict[int, Any]) -> Any:
    """The same containers with other content: tensors of zeros, tied where they were, and numbers for values."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, torch.Tensor):
        size = value.numel() * value.dtype.itemsize
        blank = of_bytes(torch.zeros(size, dtype=torch.uint8), value.dtype, value.shape)
    elif isinstance(value, np.ndarray):
        blank = np.zeros(value.shape, value.dtype)
    elif isinstance(value, dict) and value:
        blank = value.copy()
        for key, child in value.items():
            blank[key] = blank_copy(child, made)
        return blank
    elif type(value) in (list, tuple):
        return type(value)(blank_copy(child, made) for child in value)
    elif isinstance(value, (Pair, Settings)):
        return type(value)(*(blank_copy(getattr(value, name), made) for name in type(value).__annotations__))
    else:
        return value
    made[id(value)] = blank
    return blank


# --- equality --------------------------------------------------------------------------------------------------------


def difference(found: Any, expected: Any, at: str = "state") -> str | None:
    """The first place where two states are not the same in types, structure, order and bits."""
    if type(found) is not type(expected):
        return f"{at}: {_printed(found):.200} instead of {_printed(expected):.200}"
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape and bits(found) == bits(expected)
    elif isinstance(expected, (np.ndarray, np.generic)):
        same = (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, dict):
        factories = [getattr(mapping, "default_factory", None) for mapping in (found, expected)]
        keys = difference(list(found), list(expected), f"keys of {at}")
        if keys or factories[0] is not factories[1]:
            return keys or f"{at}: {factories}"
        return _first(difference(found[key], child, f"{at}[{key!r}]") for key, child in expected.items())
    elif isinstance(expected, (list, tuple, collections.deque)):
        if len(found) != len(expected) or getattr(found, "maxlen", None) != getattr(expected, "maxlen", None):
            return f"{at}: {found!r:.200} instead of {expected!r:.200}"
        pairs = enumerate(zip(found, expected, strict=True))
        return _first(difference(one, other, f"{at}[{n}]") for n, (one, other) in pairs)
    elif isinstance(expected, Settings):
        return difference(vars(found), vars(expected), at)
    elif isinstance(expected, (float, complex)):
        same = _float_bits(found) == _float_bits(expected)
    elif isinstance(expected, (set, frozenset)):
        same = sorted(map(repr, found)) == sorted(map(repr, expected))
    elif isinstance(expected, (decimal.Decimal, fractions.Fraction, uuid.UUID)):
        same = str(found) == str(expected)
    else:
        same = found == expected
    return None if same else f"{at}: {_printed(found):.200} instead of {_printed(expected):.200}"


def tied_places(state: Any) -> set[frozenset[str]]:
    """The groups of places that have the very same tensor or array, which has elements."""
    places: dict[int, set[str]] = collections.defaultdict(set)
    _note_places(state, "state", places)
    return {frozenset(group) for group in places.values() if len(group) > 1}


def ties_are_kept(found: Any, state: Any) -> bool:
    """Whether places that have one object in ``state`` do so in ``found``. Others that share its memory may join."""
    groups = tied_places(found)
    return all(any(group <= other for other in groups) for group in tied_places(state))


def _note_places(value: Any, at: str, places: dict[int, set[str]]) -> None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if (value.numel() if isinstance(value, torch.Tensor) else value.size) > 0:
            places[id(value)].add(at)
    elif isinstance(value, dict):
        for key, child in value.items():
            _note_places(child, f"{at}[{key!r}]", places)
    elif isinstance(value, (list, tuple)):
        for position, child in enumerate(value):
            _note_places(child, f"{at}[{position}]", places)
    elif isinstance(value, Settings):
        _note_places(vars(value), at, places)


def _first(found: Any) -> str | None:
    return next((one for one in found if one is not None), None)


def _float_bits(number: complex) -> bytes:
    return struct.pack("<d", number) if isinstance(number, float) else struct.pack("<dd", number.real, number.imag)
