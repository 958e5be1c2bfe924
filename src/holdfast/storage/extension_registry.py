"""Finds the extensions that an index names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.storage.extensions import Extension
from holdfast.storage.zstd import ZStandard


class ExtensionRegistry:
    """Extensions by name. Those that come with the library are known from the start.

    Example:
        >>> ExtensionRegistry().from_descriptor_list(["rot13/1"])
        Traceback (most recent call last):
        ValueError: Unknown extension name='rot13'
    """

    def __init__(self) -> None:
        self.extensions: dict[str, Any] = {ZStandard.registry_name(): ZStandard}

    def register(self, cls: type[Extension]) -> None:
        """Make an extension known, in the place of one that has the same name."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> list[Any]:
        """The extensions that these descriptors name, in their order."""
        found = []
        for descriptor in descriptors:
            name, _, version = descriptor.partition("/")
            if name not in self.extensions:
                raise ValueError(f"Unknown extension name='{name}'")
            found.append(self.extensions[name].from_descriptor(version))
        return found
