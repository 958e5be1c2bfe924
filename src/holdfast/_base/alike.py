"""Thousands of things that are alike but for their keys: columns in the place of an object for each.

To make an object for each tensor, in each phase of a save, takes longer than to write a small tensor. Nearly all
tensors of a state are of a few kinds, so whatever is said of a kind is said once, and arrays say of which each is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

Numbers = npt.NDArray[np.int64]

T = TypeVar("T")
V = TypeVar("V")


class AlikeItems(Sequence[T]):
    """A sequence whose items are made when somebody asks for one.

    Subclasses say how an item is made of one that it is like, and its key.
    """

    def __init__(self, keys: list[str], likes: list[T], kinds: Numbers) -> None:
        self.keys = keys
        self.likes = likes
        """One of each kind. Its own key means nothing."""
        self.kinds = kinds
        """The number of the kind that each item is of."""

    @abstractmethod
    def _made(self, like: T, position: int) -> T:
        """The item at a position."""

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return self.chosen(np.arange(len(self))[place])
        position = range(len(self))[place]
        return self._made(self.likes[self.kinds[position]], position)

    def __iter__(self) -> Iterator[T]:
        return map(self._made, self.each(self.likes), range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def each(self, of_kind: Sequence[V]) -> list[V]:
        """For each item what was found out about its kind."""
        return [of_kind[kind] for kind in self.kinds.tolist()]

    def how_often(self) -> list[int]:
        """How many items there are of each kind."""
        found: list[int] = np.bincount(self.kinds, minlength=len(self.likes)).tolist()
        return found

    def chosen(self, positions: Numbers) -> Self:
        """Some of them, in that order."""
        keys = self.keys
        return self._with([keys[position] for position in positions.tolist()], self.likes, self.kinds[positions])

    def with_others(self, others: dict[int, T]) -> Self:
        """The same with other items, which have the same keys, at some positions."""
        kinds = self.kinds.copy()
        kinds[list(others)] = np.arange(len(self.likes), len(self.likes) + len(others))
        return self._with(self.keys, [*self.likes, *others.values()], kinds)

    def followed_by(self, more: Self) -> Self:
        """All of these, and then others."""
        kinds = np.concatenate([self.kinds, more.kinds + len(self.likes)])
        return self._with([*self.keys, *more.keys], [*self.likes, *more.likes], kinds)

    def _with(self, keys: list[str], likes: list[T], kinds: Numbers) -> Self:
        return type(self)(keys, likes, kinds)


def numbered(looks: Iterable[Any]) -> tuple[list[Any], Numbers]:
    """What there is, in the order in which it is first met, and for each item the number of what it is.

    >>> numbered("abca")[0], numbered("abca")[1].tolist()
    (['a', 'b', 'c'], [0, 1, 2, 0])
    """
    looks = list(looks)
    numbers = {look: number for number, look in enumerate(dict.fromkeys(looks))}
    return list(numbers), np.fromiter(map(numbers.__getitem__, looks), np.int64, len(looks))
