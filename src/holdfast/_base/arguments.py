"""Arguments as people write them: sizes (``"5GB"``, ``4096``), and one of several words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from holdfast._base.tuning import SMALLEST_BUDGET

Size: TypeAlias = int | str
"""A number of bytes, or the same as people write it: ``"5GB"``, ``"1.5 GiB"``, ``4096``."""

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}{end}": 1000 ** (at + 1) for at, letter in enumerate("KMGT") for end in ("", "B")})
_UNITS.update({f"{letter}IB": 1024 ** (at + 1) for at, letter in enumerate("KMGT")})
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(wish: Size) -> int:
    """A number of bytes, given as a number or as people write it. Anything else, and less than one, is a ValueError.

    >>> parse_size("256MB"), parse_size("1.5 GiB"), parse_size("4096"), parse_size(1 << 20)
    (256000000, 1610612736, 4096, 1048576)
    """
    nbytes = wish if isinstance(wish, int) else _parsed(wish)
    if nbytes is None or isinstance(wish, bool):
        raise ValueError(f"{wish!r} is not a size; write it like 256MB, 1.5GiB or 4096")
    if nbytes < 1:
        raise ValueError(f"{wish!r} is not a size: it must be at least one byte")
    return nbytes


def _parsed(text: object) -> int | None:
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = None if found is None else _UNITS.get(found.group(2).upper())
    if found is None or unit is None:
        return None
    return int(Fraction(found.group(1)) * unit)


def checked_size(name: str, wish: Size | None) -> int | None:
    """The number of bytes that the argument ``name`` stands for; None stays None.

    >>> checked_size("max_file_size", "2 GB"), checked_size("max_file_size", None)
    (2000000000, None)
    >>> checked_size("max_file_size", "much")
    Traceback (most recent call last):
    ValueError: max_file_size: 'much' is not a size; write it like 256MB, 1.5GiB or 4096
    """
    try:
        return None if wish is None else parse_size(wish)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def checked_budget(wish: Size | None) -> int | None:
    """The ``memory_budget`` that a caller gave, if it is one.

    >>> checked_budget("64MiB")
    67108864
    >>> checked_budget(1000)
    Traceback (most recent call last):
    ValueError: memory_budget must be 262144 bytes at least, not 1000: buffers take that much
    """
    budget = checked_size("memory_budget", wish)
    if budget is not None and budget < SMALLEST_BUDGET:
        raise ValueError(
            f"memory_budget must be {SMALLEST_BUDGET} bytes at least, not {budget}: buffers take that much"
        )
    return budget


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise if the argument ``name`` is none of the words that it can be.

    >>> check_choice("writer", "tread", ("thread", "process"))
    Traceback (most recent call last):
    ValueError: writer must be 'thread' or 'process', not 'tread'
    """
    # Not by ``in`` alone: to Python, 1 is True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")
