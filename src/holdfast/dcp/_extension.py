"""Extensions of how items are stored, such as compression."""

from __future__ import annotations

from holdfast._formats.dcp.extensions import Extension, StreamTransformExtension
from holdfast._formats.dcp.transforms import ExtensionRegistry
from holdfast._formats.dcp.zstd import ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
