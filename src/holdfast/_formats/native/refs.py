"""What stands in a stored tree in place of the things that are not plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from holdfast._base.alike import AlikeItems, numbered
from holdfast._formats.native.dtypes import DType


@dataclass(slots=True, unsafe_hash=True)  # never changed, but a frozen one takes five times as long to make
class TensorRef:
    """A stored tensor, or numpy array: its key, and what is known of it without reading it."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str = "replicated"
    numpy: Any = None
    """The numpy dtype (as ``dtype.str`` or ``dtype.descr``) if it was a numpy array."""
    rank: int | None = None
    """The rank that it belongs to, if it is of the kind ``per_rank``."""

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


class TensorRefs(AlikeItems[TensorRef]):
    """The tensors of a checkpoint, as columns."""

    def _made(self, like: TensorRef, position: int) -> TensorRef:
        return TensorRef(self.keys[position], like.dtype, like.shape, like.kind, like.numpy, like.rank)

    def __iter__(self) -> Iterator[TensorRef]:
        likes = self.each([(like.dtype, like.shape, like.kind, like.numpy, like.rank) for like in self.likes])
        return iter([TensorRef(key, *like) for key, like in zip(self.keys, likes, strict=True)])

    @classmethod
    def of(cls, tensors: Sequence[TensorRef]) -> TensorRefs:
        """The same tensors, as columns."""
        if isinstance(tensors, cls):
            return tensors
        looks = [(ref.dtype.name, ref.shape, ref.kind, ref.rank, str(ref.numpy)) for ref in tensors]
        kinds = numbered(looks)[1]
        first = np.unique(kinds, return_index=True)[1].tolist()
        return cls([ref.key for ref in tensors], [tensors[position] for position in first], kinds)


@dataclass(frozen=True)
class PerRankValues:
    """A value per rank of the save."""

    ranks: tuple[Any, ...]


@dataclass(frozen=True)
class Slot:
    """The place of a per-rank value, while the ranks have not met yet. It is never stored."""

    name: str


@dataclass(frozen=True)
class UnregisteredValue:
    """A value of a class that this program has not registered (``holdfast.register_type``): its fields, as plain data.

    ``kind`` is ``enum``, ``dataclass`` or ``namedtuple``; the only field of an enum member is ``name``.
    """

    kind: str
    type: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class PickledValue:
    """A pickled value that was not loaded, because nobody allowed it."""

    data: bytes


@dataclass(frozen=True)
class UnknownValue:
    """A value of a type that this version does not know, as it is stored."""

    type: str
    stored: Mapping[str, Any]


class Anything:
    """In a state to load into: takes whatever is stored. There is one of it, ``ANYTHING``."""

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING = Anything()
