"""Lists of named tuples that travel between ranks."""

from __future__ import annotations

from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])


class NamedRows(list[Row]):
    """A list of named tuples of one class, which is pickled as columns: several times faster than row by row.

    >>> import pickle
    >>> from holdfast.boxes import Box
    >>> pickle.loads(pickle.dumps(NamedRows([Box((0,), (2,)), Box((2,), (1,))])))
    [Box(offsets=(0,), sizes=(2,)), Box(offsets=(2,), sizes=(1,))]
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_columns, (type(self[0]) if self else None, list(zip(*self, strict=True)))


def _from_columns(kind: Any, columns: list[tuple[Any, ...]]) -> NamedRows[Any]:
    return NamedRows(map(kind._make, zip(*columns, strict=True)) if columns else ())
