"""From typed values to the state that was saved.

The file is not trusted. Nothing it names is imported or called; what it holds must have the form that
docs/format.md gives it, and takes time and memory in proportion to its size.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from holdfast._base.notices import warn_caller
from holdfast._formats.native.encoding import FACTORIES, Path
from holdfast._formats.native.keys import readable
from holdfast._formats.native.leaf_types import STANDARD_TYPES, TORCH_TYPES, LeafType
from holdfast._formats.native.members import (
    DEEPEST,
    JSON,
    Malformed,
    Members,
    NotHere,
    bytes_from,
    float_from,
    int_from,
    member,
    text_from,
)
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.numpy_types import NUMPY_ARRAY, NUMPY_DTYPE, NUMPY_SCALAR
from holdfast._formats.native.refs import PerRankValues, PickledValue, UnknownValue, UnregisteredValue
from holdfast._formats.native.registered_types import DoesNotFit, instance_of, member_named, registered_as
from holdfast.errors import DamagedCheckpointError, UnreadablePickleError

PLAIN = frozenset({type(None), bool, int, float, str})
_MOST_OF_ONE_HASH = 128
_MANY_KEYS = 1024


def decode(stored: JSON, tensor: Callable[[str], Any], *, allow_pickle: bool = False) -> Any:
    """The state that was stored; ``tensor(key)`` gives what to put where a tensor is referred to.

    Values per rank, of unregistered classes, of unknown types, and pickles (unless they are allowed) become the records
    of ``refs.py``. Raises ``DamagedCheckpointError`` for what cannot have been stored.

    >>> decode({"betas": {"$": "tuple", "items": [0.9, 0.999]}}, tensor=str)
    {'betas': (0.9, 0.999)}
    """
    return Decoder(tensor, allow_pickle=allow_pickle).decode(stored)


class Decoder:
    """Reads typed values. Use ``decode``."""

    def __init__(self, tensor: Callable[[str], Any], *, allow_pickle: bool) -> None:
        self._tensor = tensor
        self._allow_pickle = allow_pickle
        self._place: list[Any] = []
        self._depth = 0
        self._closed = 0

    def decode(self, stored: JSON) -> Any:
        """The value that was stored."""
        try:
            return self._child(stored)
        except Malformed as error:
            raise malformed(tuple(self._place), str(error)) from None

    def _child(self, stored: JSON) -> Any:
        kind = type(stored)
        if kind in PLAIN:
            return stored
        if kind is list:
            return self.items(stored)
        if kind is not dict:
            raise Malformed(f"JSON has no {kind.__name__}")
        if "$" not in stored:
            return self.members(stored)
        name = stored["$"]
        if type(name) is not str:
            raise Malformed("the name of its type is not a str")
        reader = _readers.get(name)
        if reader is None:
            return UnknownValue(name, _Fields(stored))
        try:
            return reader(self, stored)
        except NotHere:
            return UnknownValue(name, _Fields(stored))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Malformed(f"it is nested in more than {DEEPEST} containers")
        self._place.append(None)

    def _leave(self) -> None:
        # Only reached without an error; after one, the place says where it was.
        self._depth -= 1
        self._place.pop()

    def items(self, stored: list[JSON]) -> list[Any]:
        """The items of a list-like container."""
        self._enter()
        place, values = self._place, []
        for position, item in enumerate(stored):
            place[-1] = position
            values.append(item if type(item) in PLAIN else self._child(item))
        self._leave()
        return values

    def closed_items(self, stored: list[JSON]) -> list[Any]:
        """The items of a container in which no tensors can be."""
        self._closed += 1
        values = self.items(stored)
        self._closed -= 1
        return values

    def members(self, stored: dict[str, JSON]) -> dict[str, Any]:
        """The members of an object, by name."""
        self._enter()
        place, values = self._place, {}
        for name, item in stored.items():
            place[-1] = name
            kind = type(item)
            if kind is dict and item.get("$") == "tensor":  # most of the time, so it takes the shortest way
                values[name] = self.read_tensor(item)
            else:
                values[name] = item if kind in PLAIN else self._child(item)
        self._leave()
        return values

    def pairs(self, stored: Members) -> dict[Any, Any]:
        """The items of a dict with any keys."""
        pairs = member(stored, "items", list)
        if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
            raise Malformed("its items are not pairs")
        keys = self.closed_items([pair[0] for pair in pairs])
        _check_hashes(keys)
        self._enter()
        values: dict[Any, Any] = {}
        for key, pair in zip(keys, pairs, strict=True):
            self._place[-1] = key
            values[key] = self._child(pair[1])
        self._leave()
        if len(values) != len(pairs):
            raise Malformed("it has a key twice")
        return values

    def only_where_opened(self) -> None:
        """Tensors and values per rank have keys, so they are where paths lead."""
        if self._closed:
            raise Malformed("a tensor, or a value per rank, is where none can be")

    def read_tensor(self, stored: Members) -> Any:
        """What the caller puts for a tensor."""
        key = stored.get("key")
        if self._closed or type(key) is not str:
            self.only_where_opened()
            key = member(stored, "key", str)
        return self._tensor(key)

    def warn_of_misfit(self, type_name: str, reason: DoesNotFit) -> None:
        """Say why a value stays unregistered although its class is registered."""
        warn_caller(
            f"The stored value {readable(tuple(self._place))!r:.300} of class {type_name!r:.300} does not fit the "
            f"class of this program: {reason}. It is given as an UnregisteredValue, which has the stored fields."
        )

    def read_pickle(self, stored: Members) -> Any:
        """A pickle: loaded if the user allowed it, else left as it is."""
        data = bytes_from(stored)
        if not self._allow_pickle:
            return PickledValue(data)
        try:
            return pickle.loads(data)  # noqa: S301 - the user said that this checkpoint is trusted
        except Exception as error:  # whatever the code in the pickle raises
            key = readable(tuple(self._place))
            raise UnreadablePickleError(
                f"The pickled value {key!r:.300} cannot be loaded ({type(error).__name__}: {error!s:.300}). Install or "
                "import what it needs, or load without allow_pickle and leave it out.",
                key=key,
            ) from error


def malformed(path: Path, what: str) -> DamagedCheckpointError:
    """The error for a stored value that nobody can have stored."""
    key = readable(path)
    return DamagedCheckpointError(
        f"{RECORD}: the value {key!r:.300} is damaged: {what}. Load another checkpoint, or copy this one again from "
        "where it came from.",
        file=RECORD,
        key=key,
        expected="a typed value",
        found=what,
    )


class _Fields(dict[str, Any]):
    """The fields of a value that cannot be made here. Hashable, since it may be the key of a dict."""

    def __hash__(self) -> int:  # type: ignore[override]
        try:
            return hash(tuple(self.items()))
        except TypeError:
            return hash(tuple(self))


def _check_hashes(keys: Iterable[Any]) -> None:
    """Refuse what cannot be a key, and keys made to have one hash: a table of them takes time by their square."""
    try:
        hashes = [hash(key) for key in keys]
    except TypeError:
        raise Malformed("one of its keys cannot be a key") from None
    if len(hashes) > _MANY_KEYS and max(collections.Counter(hashes).values()) > _MOST_OF_ONE_HASH:
        raise Malformed("its keys were chosen to make reading slow")


def _read_defaultdict(decoder: Decoder, stored: Members) -> Any:
    factory = member(stored, "factory", (type(None), str))
    if factory is not None and factory not in FACTORIES:
        raise Malformed("there is no such factory")
    return collections.defaultdict(None if factory is None else FACTORIES[factory], decoder.pairs(stored))


def _read_counter(decoder: Decoder, stored: Members) -> Any:
    counter: collections.Counter[Any] = collections.Counter()
    dict.update(counter, decoder.pairs(stored))
    return counter


def _reads_set(kind: type) -> Reader:
    def read(decoder: Decoder, stored: Members) -> Any:
        items = decoder.closed_items(member(stored, "items", list))
        _check_hashes(items)
        values = kind(items)
        if len(values) != len(items):
            raise Malformed("it has an item twice")
        return values

    return read


def _read_deque(decoder: Decoder, stored: Members) -> Any:
    items, longest = decoder.closed_items(member(stored, "items", list)), member(stored, "maxlen", (type(None), int))
    if longest is not None and not len(items) <= longest < 1 << 63:
        raise Malformed("it is longer than its longest length")
    return collections.deque(items, longest)


def _read_slice(decoder: Decoder, stored: Members) -> Any:
    kinds = (*PLAIN, list, dict)
    return slice(*decoder.closed_items([member(stored, name, kinds) for name in ("start", "stop", "step")]))


def _read_per_rank(decoder: Decoder, stored: Members) -> Any:
    decoder.only_where_opened()
    return PerRankValues(tuple(decoder.items(member(stored, "ranks", list))))


def _read_enum(decoder: Decoder, stored: Members) -> Any:
    type_name, name = member(stored, "type", str), member(stored, "name", str)
    registered = registered_as("enum", type_name)
    try:
        if registered is not None:
            return member_named(registered.cls, name)
    except DoesNotFit as error:
        decoder.warn_of_misfit(type_name, error)
    return UnregisteredValue("enum", type_name, _Fields(name=name))


def _reads_fields(kind: str) -> Reader:
    def read(decoder: Decoder, stored: Members) -> Any:
        type_name, fields = member(stored, "type", str), decoder.members(member(stored, "fields", dict))
        registered = registered_as(kind, type_name)
        try:
            if registered is not None:
                return instance_of(registered, fields)
        except DoesNotFit as error:
            decoder.warn_of_misfit(type_name, error)
        return UnregisteredValue(kind, type_name, _Fields(fields))

    return read


def _reads(leaf: LeafType) -> Reader:
    return lambda decoder, stored: leaf.read(stored)


Reader = Callable[[Decoder, dict[str, JSON]], Any]

_LEAF_TYPES = (*STANDARD_TYPES.values(), NUMPY_DTYPE, NUMPY_SCALAR, NUMPY_ARRAY, *TORCH_TYPES.values())

_readers: dict[str, Reader] = {
    "tensor": Decoder.read_tensor,
    "per_rank": _read_per_rank,
    "dict": Decoder.pairs,
    "OrderedDict": lambda decoder, stored: collections.OrderedDict(decoder.pairs(stored)),
    "defaultdict": _read_defaultdict,
    "Counter": _read_counter,
    "tuple": lambda decoder, stored: tuple(decoder.items(member(stored, "items", list))),
    "set": _reads_set(set),
    "frozenset": _reads_set(frozenset),
    "deque": _read_deque,
    "slice": _read_slice,
    "str": lambda decoder, stored: text_from(stored),
    "int": lambda decoder, stored: int_from(stored),
    "float": lambda decoder, stored: float_from(stored),
    "enum": _read_enum,
    "dataclass": _reads_fields("dataclass"),
    "namedtuple": _reads_fields("namedtuple"),
    "pickle": Decoder.read_pickle,
    **{leaf.name: _reads(leaf) for leaf in _LEAF_TYPES},
}
"""By what ``$`` says."""
