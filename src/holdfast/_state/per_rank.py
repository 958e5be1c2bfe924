"""Per-rank state, and what becomes of it when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from holdfast.errors import WorldSizeError

ResizeRule = Callable[[Sequence[Any], int, int], Any]
"""Makes one rank's value from all that were stored: ``rule(values, rank, world_size)``."""


class PerRank:
    """Marks a part of a state that each rank saves for itself, and gets back for itself.

    ``on_resize`` says what a rank gets if it is loaded by another number of ranks: ``"error"`` refuses,
    ``"first"`` gives all ranks what rank 0 had, a function is called with the values of all ranks that saved, the rank
    and the number of ranks now.

    >>> position = PerRank({"samples": 1200}, on_resize=lambda values, rank, world_size: values[rank % len(values)])
    >>> position.value
    {'samples': 1200}
    """

    def __init__(self, value: Any, on_resize: Literal["error", "first"] | ResizeRule = "error") -> None:
        if not callable(on_resize) and on_resize not in ("error", "first"):
            raise ValueError(f"on_resize must be 'error', 'first' or a function, not {on_resize!r}")
        self.value = value
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, on_resize={self.on_resize!r})"

    def sources(self, key: str, saved: int, rank: int, world_size: int) -> list[int]:
        """The ranks whose values this rank needs: one, or all of those that saved if a function has to choose.

        ``saved`` is the number of ranks that saved. The key is for the error.
        """
        if saved == world_size:
            return [rank]
        if self.on_resize == "error" or saved == 0:
            raise WorldSizeError(
                f"'{key}' is stored per rank, by {saved} ranks, and is loaded by {world_size}. Load it with {saved} "
                "ranks, or say what the ranks should get: holdfast.PerRank(value, on_resize='first'), or a function",
                key=key,
                saved=saved,
                current=world_size,
            )
        if self.on_resize == "first" or isinstance(self.on_resize, FromFirst):
            return [0]
        return list(range(saved))

    def chosen(self, values: Sequence[Any], saved: int, rank: int, world_size: int) -> Any:
        """What this rank gets, given the values of its ``sources``."""
        if saved == world_size or not callable(self.on_resize):
            return values[0]
        return self.on_resize(values, rank, world_size)

    def needs_values(self, saved: int, world_size: int) -> bool:
        """Whether ``chosen`` has to see what was stored, so that it has to be read before."""
        return saved != world_size and callable(self.on_resize)


class FromFirst:
    """A rule that only looks at the value of rank 0, which spares reading all others."""

    def __init__(self, choose: ResizeRule) -> None:
        self._choose = choose

    def __call__(self, values: Sequence[Any], rank: int, world_size: int) -> Any:
        return self._choose(values, rank, world_size)
