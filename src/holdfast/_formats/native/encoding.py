"""From a state to typed values: plain JSON where JSON says exactly what a value was, objects with ``$`` elsewhere.

docs/format.md lists the types. Each is stored such that reading gives the same type and the same bits; whatever is not
listed is refused (or pickled, if that was allowed), because a subclass or a lookalike would come back as
something else.
"""

from __future__ import annotations

import collections
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast._formats.native.leaf_types import STANDARD_TYPES, TORCH_TYPES, LeafType
from holdfast._formats.native.members import (
    DEEPEST,
    JSON,
    SURROGATE,
    CannotStore,
    stored_bytes,
    stored_float,
    stored_int,
    stored_text,
)
from holdfast._formats.native.numpy_types import NUMPY_ARRAY, NUMPY_DTYPE, NUMPY_SCALAR, stored_numpy_dtype
from holdfast._formats.native.refs import PerRankValues, PickledValue, Slot, TensorRef, UnknownValue, UnregisteredValue
from holdfast._formats.native.registered_types import fields_of, member_name, registered_type, registrable_kind
from holdfast.errors import UnsupportedValueError

Path = tuple[Any, ...]
"""Where a value is: dict keys as they are, positions in lists, names of fields, numbers of ranks."""

Take = Callable[[Path, Any], "str | None"]

FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""What a ``defaultdict`` may make its values with."""

SLOT = "unfilled slot"
"""The type of what stands for values per rank until those of all ranks are put there. No checkpoint contains it."""

_MOST_REPORTED = 20

_TYPED = (dict, list)
"""What becomes of values that JSON has no form for."""


class Encoder:
    """Turns states into typed values.

    ``take(path, tensor)`` is called for every ``torch.Tensor``, ``numpy.ndarray`` and ``TensorRef`` that can be reached
    through dicts, lists, tuples, named tuples, dataclasses and ranks. It answers with the key to refer to; ``None``
    means that the key is made from the path, as the format says. It may raise.

    >>> Encoder(take=lambda path, tensor: None).encode({"betas": (0.9, 0.999), "w": np.zeros(3)})
    {'betas': {'$': 'tuple', 'items': [0.9, 0.999]}, 'w': {'$': 'tensor', 'key': 'w'}}
    """

    def __init__(self, take: Take, *, allow_pickle: bool = False) -> None:
        self._take = take
        self._allow_pickle = allow_pickle
        self._begin(())

    def _begin(self, path: Path) -> None:
        self._place: list[Any] = list(path)
        self._around: set[int] = set()
        """The identities of the containers that we are in; their number is the depth."""
        self._closed = 0
        """How many of them are not opened, so that tensors in them have no keys."""
        self._refused: list[tuple[Path, str]] = []
        self._without_key: list[dict[str, JSON]] = []

    def encode(self, value: Any, path: Path = ()) -> JSON:
        """The typed value of a state that is at ``path``.

        Raises ``UnsupportedValueError``, which names everything in it that cannot be stored.
        """
        self._begin(path)
        stored = self._child(value)
        if self._refused:
            raise _unsupported(self._refused)
        if self._without_key:
            _fill_in_keys(self._without_key, stored, path)
        return stored

    def keys(self) -> list[str]:
        """The keys that were made for the tensors of the last state, in the order in which they were taken."""
        return [reference["key"] for reference in self._without_key]

    # What follows is called once per value, so that the loops are written out.

    def _child(self, value: Any) -> JSON:
        return (_writers.get(type(value)) or _writer_for(type(value)))(self, value)

    def _enter(self, container: Any) -> bool:
        if id(container) in self._around:
            self.refuse("it contains itself; break the cycle")
            return False
        if len(self._around) == DEEPEST:
            self.refuse(f"it is nested in {DEEPEST} containers; nest it less deep")
            return False
        self._around.add(id(container))
        return True

    def _leave(self, container: Any) -> None:
        self._around.discard(id(container))

    def items(self, container: Any) -> list[JSON]:
        """The items of a list-like container."""
        if not self._enter(container):
            return []
        place, stored, writers = self._place, [], _writers
        place.append(None)
        for position, item in enumerate(container):
            place[-1] = position
            stored.append((writers.get(type(item)) or _writer_for(type(item)))(self, item))
        place.pop()
        self._leave(container)
        return stored

    def closed_items(self, container: Any) -> list[JSON]:
        """The items of a container that is not opened."""
        self._closed += 1
        stored = self.items(container)
        self._closed -= 1
        return stored

    def members(self, container: Any, contents: dict[str, Any]) -> dict[str, JSON]:
        """Named parts of a container."""
        if not self._enter(container):
            return {}
        place, stored, writers = self._place, {}, _writers
        place.append(None)
        for name, item in contents.items():
            place[-1] = name
            stored[name] = (writers.get(type(item)) or _writer_for(type(item)))(self, item)
        place.pop()
        self._leave(container)
        return stored

    def pairs(self, container: dict[Any, Any]) -> list[JSON]:
        """The keys and values of a dict, in its order."""
        if not self._enter(container):
            return []
        place, stored, typed_keys = self._place, [], set()
        place.append(None)
        for key, item in container.items():
            place[-1] = key
            self._closed += 1
            stored_key = self._child(key)
            self._closed -= 1
            if type(stored_key) in _TYPED:  # others are as different in JSON as they are in Python
                text = json.dumps(stored_key)
                if text in typed_keys:
                    self.refuse(
                        "another key of the same dict is stored as the same, so one of the two values would be lost (a "
                        "nan is like this, since no nan equals another); use keys that differ, such as str"
                    )
                typed_keys.add(text)
            stored.append([stored_key, self._child(item)])
        place.pop()
        self._leave(container)
        return stored

    def reference(self, tensor: Any) -> JSON:
        """A tensor or array: a reference to where its bytes will be."""
        key = self._take(tuple(self._place), tensor)
        reference = {"$": "tensor", "key": key or ""}
        if key is None:
            self._without_key.append(reference)
        return reference

    def is_closed(self) -> bool:
        """Whether this place is in something that is not opened."""
        return self._closed > 0

    def refuse(self, reason: str) -> None:
        """Remember that the value at this place cannot be stored."""
        self._refused.append((tuple(self._place), reason))

    def pickle_or_refuse(self, value: Any, reason: str) -> JSON:
        """A value without a stored form of its own."""
        if not self._allow_pickle:
            return self.refuse(reason)
        if isinstance(value, PickledValue):
            return {"$": "pickle", "base64": stored_bytes(value.data)}
        try:
            return {"$": "pickle", "base64": stored_bytes(pickle.dumps(value))}
        except Exception as error:  # whatever the class of the value raises
            return self.refuse(f"{reason}. It cannot be pickled either ({type(error).__name__}: {error!s:.200})")


Writer = Callable[[Encoder, Any], JSON]


def _as_it_is(encoder: Encoder, value: JSON) -> JSON:
    return value


def _write_dict(encoder: Encoder, value: dict[Any, Any]) -> JSON:
    if {str}.issuperset(map(type, value)) and "$" not in value:
        names = "".join(value)
        if names.isascii() or SURROGATE.search(names) is None:
            return encoder.members(value, value)
    return {"$": "dict", "items": encoder.pairs(value)}


def _write_pairs(name: str) -> Writer:
    return lambda encoder, value: {"$": name, "items": encoder.pairs(value)}


def _write_defaultdict(encoder: Encoder, value: collections.defaultdict[Any, Any]) -> JSON:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", None)
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        return encoder.pickle_or_refuse(
            value, f"its values are made by {factory!r}; use one of {', '.join(FACTORIES)}, or a plain dict"
        )
    return {"$": "defaultdict", "items": encoder.pairs(value), "factory": name}


def _write_tuple(encoder: Encoder, value: tuple[Any, ...]) -> JSON:
    return {"$": "tuple", "items": encoder.items(value)}


def _write_set(name: str) -> Writer:
    # Sets have another order in each process; the same set is to be stored in the same way by all ranks.
    return lambda encoder, value: {"$": name, "items": sorted(encoder.closed_items(value), key=json.dumps)}


def _write_deque(encoder: Encoder, value: collections.deque[Any]) -> JSON:
    return {"$": "deque", "items": encoder.closed_items(value), "maxlen": value.maxlen}


def _write_slice(encoder: Encoder, value: slice) -> JSON:
    start, stop, step = encoder.closed_items((value.start, value.stop, value.step))
    return {"$": "slice", "start": start, "stop": stop, "step": step}


def _write_per_rank(encoder: Encoder, value: PerRankValues) -> JSON:
    if encoder.is_closed():
        return encoder.refuse("values per rank cannot be in sets, deques or keys of dicts")
    return {"$": "per_rank", "ranks": encoder.items(value.ranks)}


def _write_slot(encoder: Encoder, value: Slot) -> JSON:
    if encoder.is_closed():
        return encoder.refuse("values per rank cannot be in sets, deques or keys of dicts")
    return {"$": SLOT, "name": value.name}


def _write_registered(encoder: Encoder, value: Any) -> JSON:
    registered = registered_type(type(value))
    assert registered is not None
    if registered.kind == "enum":
        return {"$": "enum", "type": registered.name, "name": member_name(value)}
    fields = encoder.members(value, fields_of(registered, value))
    return {"$": registered.kind, "type": registered.name, "fields": fields}


def _write_unregistered(encoder: Encoder, value: UnregisteredValue) -> JSON:
    """A value that was read by a program that did not register its class goes back as it came."""
    if value.kind == "enum":
        return {"$": "enum", "type": value.type, "name": value.fields["name"]}
    return {"$": value.kind, "type": value.type, "fields": encoder.members(value, dict(value.fields))}


def _write_unknown(encoder: Encoder, value: UnknownValue) -> JSON:
    """A value of a later version goes back as it came, unless it needs tensors that we know nothing of."""
    text = json.dumps(value.stored)
    if any(f'"$": "{kind}"' in text for kind in ("tensor", "per_rank", SLOT)):
        return encoder.refuse(f"it was saved by a later version of Holdfast, as a {value.type!r}; use that version")
    return dict(value.stored)


def _write_pickled(encoder: Encoder, value: PickledValue) -> JSON:
    return encoder.pickle_or_refuse(value, "it is a pickle, and pickles were not allowed; pass allow_pickle=True")


def _write_tensor(encoder: Encoder, value: Any) -> JSON:
    if encoder._closed:
        return encoder.pickle_or_refuse(
            value, "tensors cannot be in sets, deques or keys of dicts; put them into a list or dict"
        )
    return encoder.reference(value)


def _write_array(encoder: Encoder, value: np.ndarray) -> JSON:
    if encoder.is_closed():
        return {"$": NUMPY_ARRAY.name, **NUMPY_ARRAY.write(value)}
    stored_numpy_dtype(value.dtype)
    return encoder.reference(value)


def _writes(leaf: LeafType) -> Writer:
    return lambda encoder, value: {"$": leaf.name, **leaf.write(value)}


def _careful(writer: Writer) -> Writer:
    """For values of types that can be stored in general, but not all of them."""

    def write(encoder: Encoder, value: Any) -> JSON:
        try:
            return writer(encoder, value)
        except CannotStore as error:
            return encoder.pickle_or_refuse(value, str(error))

    return write


_writers: dict[type, Writer] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    int: lambda encoder, value: stored_int(value),
    float: lambda encoder, value: stored_float(value),
    str: lambda encoder, value: stored_text(value),
    list: Encoder.items,
    dict: _write_dict,
    collections.OrderedDict: _write_pairs("OrderedDict"),
    collections.Counter: _write_pairs("Counter"),
    collections.defaultdict: _write_defaultdict,
    tuple: _write_tuple,
    set: _write_set("set"),
    frozenset: _write_set("frozenset"),
    collections.deque: _write_deque,
    slice: _write_slice,
    PerRankValues: _write_per_rank,
    Slot: _write_slot,
    UnregisteredValue: _write_unregistered,
    UnknownValue: _write_unknown,
    PickledValue: _write_pickled,
    TensorRef: Encoder.reference,
    np.ndarray: _careful(_write_array),
    np.memmap: _careful(_write_array),
    **{kind: _careful(_writes(leaf)) for kind, leaf in STANDARD_TYPES.items()},
}
"""By exact type. Types of torch and numpy, and registered classes, are added when they are first met."""


def _writer_for(kind: type) -> Writer:
    writer = _find_writer(kind)
    if writer is None:
        return lambda encoder, value: encoder.pickle_or_refuse(value, _why_not(kind))
    _writers[kind] = writer
    return writer


def _find_writer(kind: type) -> Writer | None:
    if registered_type(kind) is not None:
        return _careful(_write_registered)
    if issubclass(kind, np.generic):
        return _careful(_writes(NUMPY_SCALAR))
    if issubclass(kind, np.dtype):
        return _careful(_writes(NUMPY_DTYPE))
    torch = sys.modules.get("torch")  # where there are values of torch, it has been imported
    if torch is None:
        return None
    if issubclass(kind, getattr(torch, "Tensor", ())):
        return _write_tensor
    if kind.__module__ == "torch" and getattr(torch, kind.__name__, None) is kind and kind.__name__ in TORCH_TYPES:
        return _careful(_writes(TORCH_TYPES[kind.__name__]))
    return None


def _why_not(kind: type) -> str:
    reason = f"values of type {kind.__module__}.{kind.__qualname__} are not stored"
    registrable = registrable_kind(kind)
    if registrable is not None:
        return f"{reason} unless the {registrable} is registered: put @holdfast.register_type above the class"
    listed = [base.__name__ for base in kind.__mro__[1:-1] if base in _writers]
    if listed:
        return f"{reason}; convert it to {listed[0]}"
    return f"{reason}; turn it into plain values, or pass allow_pickle=True"


def _unsupported(refused: list[tuple[Path, str]]) -> UnsupportedValueError:
    from holdfast._formats.native.keys import readable  # which itself needs an encoder, for paths in brackets

    places = [readable(path) for path, _ in refused]
    lines = [f"  {place or 'the state itself'}: {why}" for place, (_, why) in zip(places, refused, strict=True)]
    if len(lines) > _MOST_REPORTED:
        lines[_MOST_REPORTED:] = [f"  and {len(refused) - _MOST_REPORTED} more (see the field `keys` of this error)"]
    return UnsupportedValueError(
        "These values cannot be stored, so nothing was saved:\n" + "\n".join(lines), key=places[0], keys=places
    )


def _fill_in_keys(references: list[dict[str, JSON]], stored: JSON, path: Path) -> None:
    from holdfast._formats.native.keys import keys_of
    from holdfast._formats.native.leaves import nodes_with_paths

    # All leaves take part, because a key must not be that of a plain value either.
    found = nodes_with_paths(stored)
    keys = keys_of(path + below for below, _ in found) if path else keys_of(below for below, _ in found)
    key_at = {id(node): key for key, (_, node) in zip(keys, found, strict=True)}
    for reference in references:
        reference["key"] = key_at[id(reference)]
