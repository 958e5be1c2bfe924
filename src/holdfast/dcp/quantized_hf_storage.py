"""Hugging Face folders of quantized models."""

from __future__ import annotations

from holdfast._dcp.quantized_reader import QuantizedHuggingFaceStorageReader
from holdfast._formats.hf_folder.names import INDEX_NAME

__all__ = ["QuantizedHuggingFaceStorageReader"]

_metadata_fn: str = INDEX_NAME
