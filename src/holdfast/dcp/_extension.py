"""Extensions of how items are stored, such as compression."""

from __future__ import annotations

from holdfast.storage.extension_registry import ExtensionRegistry
from holdfast.storage.extensions import Extension, StreamTransformExtension
from holdfast.storage.zstd import ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
