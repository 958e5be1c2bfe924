"""Descriptions of thousands of tensors that one rank holds, and these tensors, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from holdfast._base.alike import AlikeItems, Numbers, numbered
from holdfast._layout.descriptions import LocalTensor, SavingRanks, TensorDescription, said_of_dense


class Descriptions(AlikeItems[TensorDescription]):
    """What a rank has of its tensors."""

    def _made(self, like: TensorDescription, position: int) -> TensorDescription:
        made: TensorDescription = tuple.__new__(TensorDescription, (self.keys[position], *like[1:]))
        return made

    @classmethod
    def of(cls, descriptions: Sequence[TensorDescription]) -> Descriptions:
        """The same, each as one of a kind of its own."""
        if isinstance(descriptions, cls):
            return descriptions
        count = len(descriptions)
        return cls([described.key for described in descriptions], list(descriptions), np.arange(count))


class LocalTensors(Mapping[str, LocalTensor]):
    """The tensors and numpy arrays of a rank, by their keys."""

    def __init__(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        addresses: Sequence[int],
        stored_dtypes: Sequence[torch.dtype | None] | None,
    ) -> None:
        self.values_in_order = values
        self.addresses = addresses
        """As ``plain_addresses`` has found them."""
        self.stored_dtypes = stored_dtypes
        """As which they are stored, if that is another one than their own; None if all are stored as they are."""
        self._keys = keys

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Where each of them is in the columns."""
        return dict(zip(self._keys, range(len(self._keys)), strict=True))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __getitem__(self, key: str) -> LocalTensor:
        position = self.positions[key]
        stored_dtype = None if self.stored_dtypes is None else self.stored_dtypes[position]
        return LocalTensor(key, self.values_in_order[position], stored_dtype)


def describe_dense(
    values: Sequence[Any],
    addresses: Sequence[int],
    stored_dtypes: Sequence[torch.dtype | None] | None,
    ranks: SavingRanks,
) -> tuple[list[TensorDescription], Numbers]:
    """Describe all tensors with an address at once: the kinds that there are, and which each of them is.

    All that has to be looked at more closely has the kind -1.
    """
    if stored_dtypes is None:
        looks = [
            (value.dtype, value.shape) if address else None for value, address in zip(values, addresses, strict=True)
        ]
    else:
        looks = [
            (stored or value.dtype, value.shape) if address else None
            for value, address, stored in zip(values, addresses, stored_dtypes, strict=True)
        ]
    found, numbers = numbered(looks)
    said = [None if look is None else said_of_dense(*look, ranks) for look in found]
    likes = [described for described in said if described is not None]
    places = np.cumsum([described is not None for described in said]) - 1
    kind_of = np.array([-1 if described is None else place for described, place in zip(said, places, strict=True)])
    return likes, kind_of.astype(np.int64)[numbers]
