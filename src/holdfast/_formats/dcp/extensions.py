"""Extensions: what the bytes of items went through, named in the index so that a reader can undo it."""

from __future__ import annotations

import abc
from typing import IO


class Extension(abc.ABC):
    """Something that changes how items are stored. The index holds its descriptor, ``name/version``."""

    @staticmethod
    @abc.abstractmethod
    def registry_name() -> str:
        """The name in descriptors, without a slash."""

    @staticmethod
    @abc.abstractmethod
    def from_descriptor(version: str) -> Extension:
        """The extension that wrote this version; an empty one if the descriptor has none."""

    @abc.abstractmethod
    def get_descriptor(self) -> str:
        """How the index refers to this extension."""


class StreamTransformExtension(Extension):
    """An extension through which bytes pass, such as compression or encryption."""

    @abc.abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream to write an item to. What comes out of it goes to ``output``, all of it when it is closed."""

    @abc.abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """A stream to read an item from, out of what was written to ``output``."""
