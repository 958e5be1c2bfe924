"""The smallest parts of typed values: what may be a member of a stored object, and how to take one out of it."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping
from typing import Any

JSON = Any
"""What a JSON parser gives: ``None``, bools, ints, floats, strs, lists, and dicts with str keys."""

Members = Mapping[str, JSON]

DEEPEST = 128
"""How deep containers may be nested. Deeper states are mistakes, and JSON parsers have limits of their own."""

SURROGATE = re.compile("[\ud800-\udfff]")

LARGEST_PLAIN_INT = 1 << 2048
"""JSON parsers refuse, or take long for, numbers of thousands of digits; larger ints are stored as hexadecimal str."""

_HEX_INT = re.compile("-?[0-9a-f]+")
_FLOAT_BITS = re.compile("[0-9a-f]{16}")


class Malformed(Exception):
    """A stored value is not what the format allows. The text says what is wrong with it."""


class CannotStore(Exception):
    """A value has no exact stored form. The text says why, and what to do."""


class NotHere(Exception):
    """A stored value is well-formed, but what it needs (torch, a device type) does not exist in this program."""


def member(members: Members, name: str, kind: type | tuple[type, ...]) -> Any:
    """The member of that name, which must be exactly of one of these types."""
    try:
        found = members[name]
    except KeyError:
        raise Malformed(f"it has no member {name!r}") from None
    if type(found) not in (kind if isinstance(kind, tuple) else (kind,)):
        raise Malformed(f"its member {name!r} is of the wrong type ({type(found).__name__})")
    return found


def stored_text(value: str) -> JSON:
    """A text, also one with lone surrogates, which JSON in UTF-8 cannot hold."""
    if value.isascii() or SURROGATE.search(value) is None:
        return value
    return {"$": "str", "base64": stored_bytes(value.encode("utf-8", "surrogatepass"))}


def text_from(stored: JSON) -> str:
    """The text that ``stored_text`` stored."""
    if isinstance(stored, str):
        return stored
    if not isinstance(stored, dict) or stored.get("$") != "str":
        raise Malformed("a str was expected")
    try:
        return bytes_from(stored).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("its bytes are not UTF-8") from None


def stored_int(value: int) -> JSON:
    """An int of any size."""
    if -LARGEST_PLAIN_INT < value < LARGEST_PLAIN_INT:
        return value
    return {"$": "int", "hex": format(value, "x")}


def int_from(stored: JSON) -> int:
    """The int that ``stored_int`` stored."""
    if type(stored) is int:
        return stored
    if not isinstance(stored, dict) or stored.get("$") != "int":
        raise Malformed("an int was expected")
    digits = member(stored, "hex", str)
    if _HEX_INT.fullmatch(digits) is None:
        raise Malformed("it is not a hexadecimal number")
    return int(digits, 16)


def stored_float(value: float) -> JSON:
    """A float, bit for bit."""
    # Infinities and NaNs: JSON has no numbers for them. (The difference of anything else with itself is zero.)
    if value - value != 0.0:
        return {"$": "float", "bits": struct.pack(">d", value).hex()}
    return value


def float_from(stored: JSON) -> float:
    """The float that ``stored_float`` stored."""
    if type(stored) is float:
        return stored
    if not isinstance(stored, dict) or stored.get("$") != "float":
        raise Malformed("a float was expected")
    bits = member(stored, "bits", str)
    if _FLOAT_BITS.fullmatch(bits) is None:
        raise Malformed("the bits of a float are 16 hexadecimal digits")
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def stored_bytes(value: bytes | bytearray | memoryview) -> str:
    """Bytes, as a ``base64`` member."""
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def bytes_from(members: Members) -> bytes:
    """The bytes of the ``base64`` member."""
    try:
        return base64.b64decode(member(members, "base64", str), validate=True)
    except ValueError:
        raise Malformed("its bytes are not base64") from None
