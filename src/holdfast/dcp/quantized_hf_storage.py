"""Hugging Face folders of quantized models."""

from __future__ import annotations

from holdfast.storage.hf_names import INDEX_NAME
from holdfast.storage.quantized_reader import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]

_metadata_fn: str = INDEX_NAME
