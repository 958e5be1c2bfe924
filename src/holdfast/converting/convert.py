"""``holdfast.convert``: a checkpoint of any format as one of another."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.converting.target import Target

_TARGETS = {
    "native": ("holdfast.converting.native_target", "NativeTarget"),
    "dcp": ("holdfast.converting.dcp_target", "DcpTarget"),
    "safetensors": ("holdfast.converting.safetensors_target", "SafetensorsTarget"),
    "torch": ("holdfast.converting.torch_target", "TorchTarget"),
}
"""By format. They are imported when they are wanted: some need torch."""


def target_for(to: str, **options: Any) -> Target:
    """What writes a format."""
    if to not in _TARGETS:
        raise ValueError(f"there is no format {to!r} to convert to; there are {', '.join(_TARGETS)}")
    module, name = _TARGETS[to]
    made: Target = getattr(importlib.import_module(module), name)(**options)
    return made
