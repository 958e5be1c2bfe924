"""Equality to the bit and to the type: what a checkpoint owes to those who saved."""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import torch


def assert_same(found: Any, expected: Any) -> None:
    """Fail, and say where, unless two states are the same in types, structure, order and bits."""
    differences = list(_differences(found, expected, "state"))
    assert not differences, "\n".join(differences[:20])


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _differences(found: Any, expected: Any, at: str) -> Iterator[str]:
    if type(found) is not type(expected):
        yield f"{at}: found a {type(found).__name__} {found!r:.99}, not {type(expected).__name__} {expected!r:.99}"
    elif isinstance(expected, torch.Tensor):
        if (found.dtype, found.shape, bits_of(found)) != (expected.dtype, expected.shape, bits_of(expected)):
            yield f"{at}: found {found!r:.200}, expected {expected!r:.200}"
    elif isinstance(expected, np.ndarray):
        if (found.dtype, found.shape, found.tobytes()) != (expected.dtype, expected.shape, expected.tobytes()):
            yield f"{at}: found {found!r:.200}, expected {expected!r:.200}"
    elif isinstance(expected, np.generic):
        if (found.dtype, found.tobytes()) != (expected.dtype, expected.tobytes()):
            yield f"{at}: found {found!r:.200}, expected {expected!r:.200}"
    elif isinstance(expected, dict):
        yield from _differences(getattr(found, "default_factory", None), getattr(expected, "default_factory", None), at)
        yield from _differences(list(found), list(expected), f"{at} keys")
        for key in expected.keys() & found.keys():
            yield from _differences(found[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple, collections.deque)):
        if len(found) != len(expected) or getattr(found, "maxlen", None) != getattr(expected, "maxlen", None):
            yield f"{at}: found {found!r:.200}, expected {expected!r:.200}"
        for position, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(one, other, f"{at}[{position}]")
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        yield from _differences(vars(found), vars(expected), at)
    elif isinstance(expected, (float, complex)):
        if _float_bits(found) != _float_bits(expected):
            yield f"{at}: found {found!r}, expected {expected!r}"
    elif isinstance(expected, Decimal):
        if str(found) != str(expected):
            yield f"{at}: found {found!r}, expected {expected!r}"
    elif found != expected or getattr(found, "fold", 0) != getattr(expected, "fold", 0):
        yield f"{at}: found {found!r:.200}, expected {expected!r:.200}"


def _float_bits(number: complex) -> bytes:
    return struct.pack("<d", number) if isinstance(number, float) else struct.pack("<dd", number.real, number.imag)
