"""Whole model files out of files that hold parts of tensors."""

from __future__ import annotations

from holdfast._dcp.consolidate import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from holdfast.dcp._hf_utils import (
    DATA_OFFSETS_KEY,
    DEFAULT_EXTRA_METADATA_KEY,
    DTYPE_KEY,
    SAVED_OFFSETS_KEY,
    SHAPE_KEY,
    SUFFIX,
    _metadata_fn,
)

__all__ = [
    "DATA_OFFSETS_KEY",
    "DEFAULT_EXTRA_METADATA_KEY",
    "DTYPE_KEY",
    "SAVED_OFFSETS_KEY",
    "SHAPE_KEY",
    "SUFFIX",
    "_metadata_fn",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
]
