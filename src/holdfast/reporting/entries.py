"""The entries of a checkpoint in columns: what each key is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.formats.native.refs import TensorRef
from holdfast.reporting.packing import Distinct, front_coded
from holdfast.reporting.value_texts import type_and_text
from holdfast.sources.source import Source
from holdfast.sources.stored_nodes import StoredNode

VALUE = "value"
"""The kind of entries that are no tensors."""


@dataclass(frozen=True)
class Entry:
    """A key, and the tensor or the value that it has."""

    key: str
    value: Any

    @property
    def ref(self) -> TensorRef | None:
        """The tensor, if it is one."""
        return self.value if isinstance(self.value, TensorRef) else None


def entries_of(source: Source) -> list[Entry]:
    """All entries of a checkpoint, in its order."""
    return [Entry(leaf.key, leaf.value) for leaf in StoredNode.of(source.tree).leaves()]


def entry_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    """Key, kind, dtype and shape of every entry; the text of values; which tensors have another's elements."""
    dtypes, shapes, kinds = Distinct(), Distinct(), Distinct()
    kind, dtype, shape = [], [], []
    values: dict[int, tuple[str, str]] = {}
    per_rank: dict[int, int] = {}
    tied: dict[int, int] = {}
    first_with: dict[str, int] = {}
    for number, entry in enumerate(entries):
        ref = entry.ref
        if ref is None:
            kind.append(kinds.number(VALUE))
            dtype.append(-1)
            shape.append(-1)
            values[number] = type_and_text(entry.value)
            continue
        kind.append(kinds.number(ref.kind))
        dtype.append(dtypes.number((str(ref.dtype), ref.dtype.itemsize)))
        shape.append(shapes.number(ref.shape))
        if ref.rank is not None:
            per_rank[number] = ref.rank
        if first_with.setdefault(ref.key, number) != number:
            tied[number] = first_with[ref.key]
    return {
        "key": front_coded(entry.key for entry in entries),
        "kind": kind,
        "dtype": dtype,
        "shape": shape,
        "kinds": kinds.things,
        "dtypes": dtypes.things,
        "shapes": shapes.things,
        "values": values,
        "perRank": per_rank,
        "tied": tied,
    }
