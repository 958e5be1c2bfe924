"""Sizes as people write them: ``"5GB"``, ``"1.5 GiB"``, ``4096``."""

from __future__ import annotations

import re
from fractions import Fraction

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
