"""Plain values of torch (dtypes, devices, sizes): written without importing torch, read where there is torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from holdfast.formats.native.leaf_types import LeafType
from holdfast.formats.native.stored_members import CannotStore, Malformed, Members, NotHere, member

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
