"""Values that are not tensors, in their stored form."""

from __future__ import annotations

import io
from typing import Any

import torch


def encode_value(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def decode_value(blob: bytes, *, source: str, key: str, allow_pickle: bool = False, verify: bool = True) -> Any:
    return torch.load(io.BytesIO(blob), weights_only=not allow_pickle)


def needs_pickle(blob: bytes) -> str | None:
    return None
