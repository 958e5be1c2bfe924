"""Arguments that are numbers of bytes."""

from __future__ import annotations

from typing import Any

from holdfast.tuning import SMALLEST_BUDGET


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
