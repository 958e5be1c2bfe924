"""Values as bytes on their way between ranks, without keeping Python's lock for long."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch

from holdfast._base.garbage import no_garbage_collection
from holdfast._base.tuning import COLUMNS_FROM, RECORDS_AT_ONCE

# Lists of our own records (named tuples, dataclasses) as columns, which pickle several times faster than row by row.
#
# A column is a tuple: how to read it, and what with. Objects of other people's classes are left as they are: what
# holds them together (one list that several refer to, say) would be lost.


Column = tuple[Any, ...]

_OURS = __name__.partition(".")[0]
_STATE_METHODS = ("__getstate__", "__setstate__")


def in_columns(values: list[Any]) -> Column:
    """A list as columns, where it consists of records.

    >>> from holdfast._base.boxes import Box
    >>> from_columns(in_columns([Box((0,), (2,)), None, Box((2,), (1,))]))
    [Box(offsets=(0,), sizes=(2,)), None, Box(offsets=(2,), sizes=(1,))]
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        return _column_of(kind)(kind, values)
    if all(_column_of(kind) is _as_they_are for kind in kinds):
        return _as_they_are(list, values)
    numbers = {kind: number for number, kind in enumerate(kinds)}
    which = [numbers[type(value)] for value in values]
    parts = [[value for value in values if type(value) is kind] for kind in kinds]
    return _mixed, which, list(map(in_columns, parts))


def from_columns(column: Column) -> list[Any]:
    """The list again."""
    read, *content = column
    values: list[Any] = read(*content)
    return values


def as_they_are(values: list[Any]) -> Column:
    """A list as one column, whatever it consists of."""
    return list, values


@lru_cache(maxsize=256)
def _column_of(kind: type) -> Callable[[type, list[Any]], Column]:
    if kind is torch.Size:
        return _as_plain_tuples
    if kind is list:
        return _as_one_list
    if kind is tuple:
        return _as_one_list_of_records
    if kind.__module__.partition(".")[0] != _OURS:
        return _as_they_are
    if issubclass(kind, tuple) and hasattr(kind, "_make"):
        return _as_named_tuples
    if not dataclasses.is_dataclass(kind) or kind.__reduce__ is not object.__reduce__ or hasattr(kind, "__slots__"):
        return _as_they_are
    own = [method for method in _STATE_METHODS if getattr(kind, method, None) is not getattr(object, method, None)]
    return _as_states if len(own) == len(_STATE_METHODS) else _as_they_are if own else _as_fields


def _as_they_are(_: type, values: list[Any]) -> Column:
    return list, values


def _as_plain_tuples(_: type, sizes: list[Any]) -> Column:
    return _sizes, list(map(tuple, sizes))


def _as_one_list(_: type, lists: list[list[Any]]) -> Column:
    return _lists, list(map(len, lists)), in_columns(list(chain.from_iterable(lists)))


def _as_one_list_of_records(_: type, tuples: list[tuple[Any, ...]]) -> Column:
    """Tuples of named tuples. Others are left as they are: pickle takes plain ones faster than anything else."""
    kind: type = next((type(members[0]) for members in tuples if members), tuple)
    if _column_of(kind) is not _as_named_tuples:
        return list, tuples
    return _tuples, list(map(len, tuples)), in_columns(list(chain.from_iterable(tuples)))


def _as_named_tuples(kind: type, rows: list[Any]) -> Column:
    return _named_tuples, kind, [in_columns(list(column)) for column in zip(*rows, strict=True)]


def _as_states(kind: type, records: list[Any]) -> Column:
    return _with_states, kind, [record.__getstate__() for record in records]


def _as_fields(kind: type, records: list[Any]) -> Column:
    """By attributes. Records that do not have the same ones, in the same order, are left as they are."""
    rows: list[dict[str, Any]] = [vars(record) for record in records]
    names = tuple(rows[0])
    if not names or any(tuple(row) != names for row in rows):
        return _as_they_are(kind, records)
    columns = zip(*(row.values() for row in rows), strict=True)
    return _with_fields, kind, names, [in_columns(list(column)) for column in columns]


def _sizes(tuples: list[tuple[int, ...]]) -> list[Any]:
    return list(map(torch.Size, tuples))


def _lists(lengths: list[int], column: Column) -> list[Any]:
    values = iter(from_columns(column))
    return [list(islice(values, length)) for length in lengths]


def _tuples(lengths: list[int], column: Column) -> list[Any]:
    values = iter(from_columns(column))
    return [tuple(islice(values, length)) for length in lengths]


def _named_tuples(kind: Any, columns: list[Column]) -> list[Any]:
    return list(map(kind._make, zip(*map(from_columns, columns), strict=True)))


def _with_states(kind: type, states: list[Any]) -> list[Any]:
    records: list[Any] = [object.__new__(kind) for _ in states]
    for record, state in zip(records, states, strict=True):
        record.__setstate__(state)
    return records


def _with_fields(kind: type, names: tuple[str, ...], columns: list[Column]) -> list[Any]:
    records = []
    for row in zip(*map(from_columns, columns), strict=True):
        record: Any = object.__new__(kind)
        vars(record).update(zip(names, row, strict=True))  # a frozen class takes its values in no other way
        records.append(record)
    return records


def _mixed(which: list[int], columns: list[Column]) -> list[Any]:
    values = [iter(from_columns(column)) for column in columns]
    return [next(values[number]) for number in which]


_OF_RECORDS = (_as_named_tuples, _as_fields, _as_states)


# A plan of very many tensors is one object for ``pickle``, which lets no other thread run until it is done with it.
# So long lists and dicts are taken out of the value and pickled in parts, each of which takes a millisecond or so.


def pack(value: Any) -> bytes:
    """A value as bytes. Whatever ``pickle`` takes will do.

    Of the entries of long lists and dicts, and of lists and dicts of many records, those that are one and the same
    object need not be so when they arrive.
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
        if (kind is not list and kind is not dict) or not _is_taken_out(value):
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


def _is_taken_out(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether it is long, or consists of many records."""
    if len(value) <= COLUMNS_FROM:
        return len(value) > RECORDS_AT_ONCE
    kind: type = type(next(iter(value)))
    return len(value) > RECORDS_AT_ONCE or _column_of(kind) in _OF_RECORDS


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
