"""Sizes as people write them (``"5GB"``, ``4096``), and arguments that are numbers of bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from holdfast._base.tuning import SMALLEST_BUDGET

# Sizes as people write them: ``"5GB"``, ``"1.5 GiB"``, ``4096``.


_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}{end}": 1000 ** (at + 1) for at, letter in enumerate("KMGT") for end in ("", "B")})
_UNITS.update({f"{letter}IB": 1024 ** (at + 1) for at, letter in enumerate("KMGT")})
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(wish: str | int) -> int:
    """A number of bytes, given as a number or as people write it. Anything else, and less than one, is a ValueError.

    >>> parse_size("256MB"), parse_size("1.5 GiB"), parse_size("4096"), parse_size(1 << 20)
    (256000000, 1610612736, 4096, 1048576)
    """
    nbytes = wish if isinstance(wish, int) else _parsed(wish)
    if nbytes is None or isinstance(wish, bool):
        raise ValueError(f"{wish!r} is no size; write it like 256MB, 1.5GiB or 4096")
    if nbytes < 1:
        raise ValueError(f"{wish!r} is no size: it has to be one byte at least")
    return nbytes


def _parsed(text: object) -> int | None:
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = None if found is None else _UNITS.get(found.group(2).upper())
    if found is None or unit is None:
        return None
    return int(Fraction(found.group(1)) * unit)


# Arguments that are numbers of bytes.


def checked_bytes(name: str, number: Any) -> int | None:
    """An option that is a number of bytes, or None.

    >>> checked_bytes("max_file_size", "2 GB")
    Traceback (most recent call last):
    ValueError: max_file_size must be a number of bytes, such as 2 << 30, not '2 GB'
    """
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"{name} must be a number of bytes, such as 2 << 30, not {number!r}")
    return number


def checked_budget(number: Any) -> int | None:
    """The ``memory_budget`` that a caller gave, if it is one.

    >>> checked_budget(1000)
    Traceback (most recent call last):
    ValueError: memory_budget must be 262144 bytes at least, not 1000: buffers take that much
    """
    budget = checked_bytes("memory_budget", number)
    if budget is not None and budget < SMALLEST_BUDGET:
        raise ValueError(
            f"memory_budget must be {SMALLEST_BUDGET} bytes at least, not {budget}: buffers take that much"
        )
    return budget
