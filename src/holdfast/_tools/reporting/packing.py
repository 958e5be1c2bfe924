"""Lists of things that repeat, as short JSON: a report of 100,000 tensors shall be a few megabytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any


class Distinct:
    """Different things, each of which gets a number when it is first seen.

    >>> shapes = Distinct()
    >>> [shapes.number(shape) for shape in ((2, 3), (4,), (2, 3))], shapes.things
    ([0, 1, 0], [(2, 3), (4,)])
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: Hashable) -> int:
        """Its number."""
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def things(self) -> list[Any]:
        """All of them, by number."""
        return list(self._numbers)


def front_coded(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Texts as how many characters each shares with the one before, and the rest: neighbours are mostly alike.

    >>> front_coded(["model.a.weight", "model.a.bias"])
    {'shared': [0, 8], 'rest': ['model.a.weight', 'bias']}
    """
    shared, rest, before = [], [], ""
    for text in texts:
        # In the browser a character beyond the first 65,536 counts twice, so none of them is shared.
        same = _shared(before, text)
        if not text[:same].isascii():
            same = next(at for at, letter in enumerate(text) if not letter.isascii())
        shared.append(same)
        rest.append(text[same:])
        before = text
    return {"shared": shared, "rest": rest}


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    for at, (letter, another) in enumerate(zip(one, other, strict=False)):
        if letter != another:
            return at
    return min(len(one), len(other))


def as_json_number(number: float | None) -> float | str | None:
    """A number as JSON has it: those that are not finite as text.

    >>> as_json_number(0.5), as_json_number(float("-inf")), as_json_number(float("nan"))
    (0.5, '-inf', 'nan')
    """
    if number is None or number - number == 0:
        return number
    return str(float(number))
