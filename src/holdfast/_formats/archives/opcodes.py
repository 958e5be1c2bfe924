"""Pickle opcodes as bytes, for the pickles that are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

PROTO_2, PROTO_4 = b"\x80\x02", b"\x80\x04"
MARK, STOP, POP = b"(", b".", b"0"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
EMPTY_DICT, SETITEMS = b"}", b"u"
EMPTY_LIST, APPENDS = b"]", b"e"
TUPLE, TUPLE1 = b"t", b"\x85"
NEW_WITHOUT_ARGUMENTS = b")\x81"
CALL_WITHOUT_ARGUMENTS = b")R"
REDUCE, BUILD, PERSISTENT_ID = b"R", b"b", b"Q"
MEMOIZE = b"\x94"

_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_INT8 = [b"K" + bytes([number]) for number in range(256)]


def name(module: str, name: str) -> bytes:
    """Push what a name stands for."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    """Push a str, in the form that all protocols have."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def integer(value: Any) -> bytes:
    """Push an int, or what can stand for one."""
    number = index(value)
    if 0 <= number < 1 << 8:
        return _INT8[number]
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    size = number.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)


def tuple_of(pushes: Sequence[bytes]) -> bytes:
    """Push a tuple of what ``pushes`` push."""
    if len(pushes) < len(_SHORT_TUPLES):
        return b"".join(pushes) + _SHORT_TUPLES[len(pushes)]
    return MARK + b"".join(pushes) + TUPLE


def recall(slot: int) -> bytes:
    """Push what is in a slot of the memo."""
    return b"h" + bytes([slot]) if slot < 1 << 8 else b"j" + slot.to_bytes(4, "little")
