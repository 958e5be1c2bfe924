"""Values as bytes on their way between ranks, without keeping Python's lock for long.

A plan of very many tensors is one object for ``pickle``, which lets no other thread run until it is done with it. So
long lists and dicts are taken out of the value and pickled in parts, each of which takes a millisecond or so.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from holdfast.coordination.record_columns import as_they_are, from_columns, in_columns
from holdfast.garbage import no_garbage_collection
from holdfast.tuning import RECORDS_AT_ONCE


def pack(value: Any) -> bytes:
    """A value as bytes. Whatever ``pickle`` takes will do.

    Of the entries of long lists and dicts, those that are one and the same object need not be so when they arrive.
    """
    with no_garbage_collection():
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(value)
        return pickle.dumps((stream.getvalue(), pickler.long_ones))


def unpack(packed: bytes) -> Any:
    """The value again."""
    with no_garbage_collection():
        rest, long_ones = pickle.loads(packed)  # noqa: S301 - sent by another rank of this job
        return _Unpickler(io.BytesIO(rest), long_ones).load()


class _Pickler(pickle.Pickler):
    """Puts long lists and dicts aside."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.long_ones: list[tuple[type, list[bytes]]] = []
        self._known: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if (kind is not list and kind is not dict) or len(value) <= RECORDS_AT_ONCE:
            return None
        if id(value) not in self._known:
            # The value goes with its number: an id means nothing once a value that was made for this is gone.
            self._known[id(value)] = len(self.long_ones), value
            self.long_ones.append((kind, list(_parts(value))))
        return self._known[id(value)][0]


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, stream: io.BytesIO, long_ones: list[tuple[type, list[bytes]]]) -> None:
        super().__init__(stream)
        self._long_ones = [_joined(*one) for one in long_ones]

    def persistent_load(self, number: int) -> Any:
        return self._long_ones[number]


def _parts(value: list[Any] | dict[Any, Any]) -> Iterator[bytes]:
    entries = value if isinstance(value, list) else list(value.items())
    for at in range(0, len(entries), RECORDS_AT_ONCE):
        part = entries[at : at + RECORDS_AT_ONCE]
        columns = [part] if isinstance(value, list) else [[key for key, _ in part], [entry for _, entry in part]]
        try:
            yield pickle.dumps(list(map(in_columns, columns)))
        except RecursionError:  # lists within lists within lists, or one within itself, which only pickle can take
            yield pickle.dumps(list(map(as_they_are, columns)))


def _joined(kind: type, parts: list[bytes]) -> Any:
    joined = kind()
    for part in parts:
        columns = map(from_columns, pickle.loads(part))  # noqa: S301 - sent by another rank of this job
        if kind is list:
            joined.extend(*columns)
        else:
            joined.update(zip(*columns, strict=True))
    return joined
