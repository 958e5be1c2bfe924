"""Types of the standard library and of torch that are stored as one value each: how to write and read them."""

from __future__ import annotations

import datetime
import pathlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from holdfast._formats.native.members import (
    CannotStore,
    Malformed,
    Members,
    NotHere,
    bytes_from,
    float_from,
    int_from,
    member,
    stored_bytes,
    stored_float,
    stored_int,
    stored_text,
    text_from,
)

# Types of the standard library that are stored as one value each: how to write them, and how to read them.


_LARGEST_FRACTION_PART = 1 << 65536
"""Beyond this, bringing a fraction to lowest terms takes noticeable time, and with it reading a hostile file."""


@dataclass(frozen=True)
class LeafType:
    """A type that is stored as one value: an object with ``$`` and some members."""

    name: str
    """What ``$`` says."""
    write: Callable[[Any], dict[str, Any]]
    """The other members for a value; raises ``CannotStore``."""
    read: Callable[[Members], Any]
    """The value for the members; raises ``Malformed`` or ``NotHere``."""


def _write_complex(value: complex) -> dict[str, Any]:
    return {"real": stored_float(value.real), "imag": stored_float(value.imag)}


def _read_complex(members: Members) -> complex:
    real, imag = member(members, "real", (float, dict)), member(members, "imag", (float, dict))
    return complex(float_from(real), float_from(imag))


def _write_bytes(value: bytes | bytearray) -> dict[str, Any]:
    return {"base64": stored_bytes(value)}


def _read_bytearray(members: Members) -> bytearray:
    return bytearray(bytes_from(members))


def _write_range(value: range) -> dict[str, Any]:
    return {"start": stored_int(value.start), "stop": stored_int(value.stop), "step": stored_int(value.step)}


def _read_range(members: Members) -> range:
    start, stop, step = (int_from(member(members, name, (int, dict))) for name in ("start", "stop", "step"))
    if step == 0:
        raise Malformed("the step of a range is not zero")
    return range(start, stop, step)


def _write_moment(value: datetime.datetime | datetime.time) -> dict[str, Any]:
    zone = value.tzinfo
    if zone is not None and (type(zone) is not datetime.timezone or _has_name(zone)):
        raise CannotStore(
            "its time zone has a name, and only the offset would be stored; convert it to UTC with "
            "`.astimezone(datetime.timezone.utc)`"
        )
    return {"iso": value.isoformat(), "fold": 1} if value.fold else {"iso": value.isoformat()}


def _has_name(zone: datetime.timezone) -> bool:
    return zone.tzname(None) != datetime.timezone(zone.utcoffset(None)).tzname(None)


def _reads_moment(kind: type[datetime.datetime] | type[datetime.time]) -> Callable[[Members], Any]:
    def read(members: Members) -> datetime.datetime | datetime.time:
        text = member(members, "iso", str)
        fold = member(members, "fold", int) if "fold" in members else 0
        if fold not in (0, 1):
            raise Malformed("a fold is 0 or 1")
        try:
            value = kind.fromisoformat(text).replace(fold=fold)
        except ValueError:
            raise Malformed("it is not a time in ISO 8601") from None
        if value.isoformat() != text:
            raise Malformed("it is not a time as `isoformat` writes it")
        return value

    return read


def _write_date(value: datetime.date) -> dict[str, Any]:
    return {"iso": value.isoformat()}


def _read_date(members: Members) -> datetime.date:
    text = member(members, "iso", str)
    try:
        value = datetime.date.fromisoformat(text)
    except ValueError:
        raise Malformed("it is not a date in ISO 8601") from None
    if value.isoformat() != text:
        raise Malformed("it is not a date as `isoformat` writes it")
    return value


def _write_timedelta(value: datetime.timedelta) -> dict[str, Any]:
    return {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}


def _read_timedelta(members: Members) -> datetime.timedelta:
    days, seconds, rest = (member(members, name, int) for name in ("days", "seconds", "microseconds"))
    if not (abs(days) <= 999_999_999 and 0 <= seconds < 86_400 and 0 <= rest < 1_000_000):
        raise Malformed("there is no such span of time")
    return datetime.timedelta(days, seconds, rest)


def _write_text(value: object) -> dict[str, Any]:
    return {"text": str(value)}


def _read_decimal(members: Members) -> Decimal:
    text = member(members, "text", str)
    try:
        value = Decimal(text)
    except ArithmeticError:
        raise Malformed("it is not a decimal number") from None
    if str(value) != text:
        raise Malformed("it is not a decimal number as `str` writes it")
    return value


def _write_fraction(value: Fraction) -> dict[str, Any]:
    if not (abs(value.numerator) < _LARGEST_FRACTION_PART and value.denominator < _LARGEST_FRACTION_PART):
        raise CannotStore("fractions of so many digits are not stored; store its two parts as ints")
    return {"numerator": stored_int(value.numerator), "denominator": stored_int(value.denominator)}


def _read_fraction(members: Members) -> Fraction:
    above, below = (int_from(member(members, name, (int, dict))) for name in ("numerator", "denominator"))
    if not (abs(above) < _LARGEST_FRACTION_PART and 0 < below < _LARGEST_FRACTION_PART):
        raise Malformed("there is no such fraction")
    return Fraction(above, below)


def _read_uuid(members: Members) -> uuid.UUID:
    text = member(members, "text", str)
    try:
        value = uuid.UUID(text)
    except ValueError:
        raise Malformed("it is not a UUID") from None
    if str(value) != text:
        raise Malformed("it is not a UUID as `str` writes it")
    return value


def _write_path(value: pathlib.PurePath) -> dict[str, Any]:
    return {"text": stored_text(str(value))}


def _reads_path(kind: type[pathlib.PurePath]) -> Callable[[Members], pathlib.PurePath]:
    return lambda members: kind(text_from(member(members, "text", (str, dict))))


STANDARD_TYPES: dict[type, LeafType] = {
    complex: LeafType("complex", _write_complex, _read_complex),
    bytes: LeafType("bytes", _write_bytes, bytes_from),
    bytearray: LeafType("bytearray", _write_bytes, _read_bytearray),
    range: LeafType("range", _write_range, _read_range),
    datetime.datetime: LeafType("datetime", _write_moment, _reads_moment(datetime.datetime)),
    datetime.time: LeafType("time", _write_moment, _reads_moment(datetime.time)),
    datetime.date: LeafType("date", _write_date, _read_date),
    datetime.timedelta: LeafType("timedelta", _write_timedelta, _read_timedelta),
    Decimal: LeafType("Decimal", _write_text, _read_decimal),
    Fraction: LeafType("Fraction", _write_fraction, _read_fraction),
    uuid.UUID: LeafType("UUID", _write_text, _read_uuid),
    type(pathlib.Path()): LeafType("Path", _write_path, _reads_path(pathlib.Path)),
    pathlib.PurePosixPath: LeafType("PurePosixPath", _write_path, _reads_path(pathlib.PurePosixPath)),
    pathlib.PureWindowsPath: LeafType("PureWindowsPath", _write_path, _reads_path(pathlib.PureWindowsPath)),
}


# Plain values of torch (dtypes, devices, sizes): written without importing torch, read where there is torch.


_DEVICE = re.compile("[a-z][a-z0-9_]{0,30}(:[0-9]{1,4})?")


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotHere("torch is not installed") from error
    return torch


def _write_name(value: object) -> dict[str, Any]:
    return {"name": str(value).removeprefix("torch.")}


def _reads_name(kind: str) -> Callable[[Members], Any]:
    def read(members: Members) -> Any:
        name = member(members, "name", str)
        torch = _torch()
        # Not getattr: torch imports some of its modules when they are asked for by name.
        value = vars(torch).get(name)
        if type(value) is not getattr(torch, kind):
            raise NotHere(f"torch here has no {kind} {name[:100]!r}")
        return value

    return read


def _write_device(value: object) -> dict[str, Any]:
    return {"name": str(value)}


def _read_device(members: Members) -> Any:
    name = member(members, "name", str)
    if _DEVICE.fullmatch(name) is None:
        raise Malformed("it is not a device")
    try:
        device = _torch().device(name)
    except (RuntimeError, ValueError) as error:
        raise NotHere(f"torch here has no device {name!r}") from error
    if str(device) != name:
        raise NotHere(f"torch here has no device {name!r}")
    return device


def _write_size(value: tuple[Any, ...]) -> dict[str, Any]:
    if any(type(size) is not int for size in value):
        raise CannotStore("its sizes are not ints; store the sizes of real tensors")
    return {"items": list(value)}


def _read_size(members: Members) -> Any:
    sizes = member(members, "items", list)
    if any(type(size) is not int or not -(1 << 63) <= size < 1 << 63 for size in sizes):
        raise Malformed("sizes are ints of 64 bits")
    return _torch().Size(sizes)


TORCH_TYPES: dict[str, LeafType] = {
    "Size": LeafType("torch.Size", _write_size, _read_size),
    "dtype": LeafType("torch.dtype", _write_name, _reads_name("dtype")),
    "device": LeafType("torch.device", _write_device, _read_device),
    "layout": LeafType("torch.layout", _write_name, _reads_name("layout")),
    "memory_format": LeafType("torch.memory_format", _write_name, _reads_name("memory_format")),
}
"""By the name of the class in the module ``torch``."""
