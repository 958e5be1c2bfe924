"""Stream transforms (compression and the like) between an item and its stored bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, Any, Protocol, cast

from holdfast._formats.dcp.extensions import Extension
from holdfast._formats.dcp.plan import ReadItem, WriteItem
from holdfast._formats.dcp.zstd import ZStandard
from holdfast.errors import HoldfastError, MissingPackageError

# Finds the extensions that an index names.


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


class StreamTransform(Protocol):
    """What a transform must offer: a name for the index, and a stream around a stream in each direction."""

    def get_descriptor(self) -> str: ...
    def transform_to(self, output: IO[bytes]) -> IO[bytes]: ...
    def transform_from(self, input: IO[bytes]) -> IO[bytes]: ...


class TransformRegistry(Protocol):
    """Finds the transforms that an index names."""

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[StreamTransform]: ...


class WriterTransforms:
    """What the bytes of an item go through on their way into a file: the last transform sees them first."""

    def __init__(self, extensions: Sequence[StreamTransform] | None = None) -> None:
        self.extensions: list[StreamTransform] = list(extensions or [])

    def transform_save_stream(self, write_item: WriteItem, raw_stream: io.IOBase) -> tuple[IO[bytes], list[str]]:
        """The stream to write the item to, and how that is recorded in the index.

        Whoever writes must close the stream, which completes the item and leaves ``raw_stream`` open.
        """
        chain: list[Any] = [_KeptOpen(raw_stream)]
        for extension in self.extensions:
            chain.append(extension.transform_to(chain[-1]))
        # Recorded in the order in which the bytes pass.
        return cast("IO[bytes]", _Chain(chain)), [extension.get_descriptor() for extension in reversed(self.extensions)]


class ReaderTransforms:
    """The way back from stored bytes to an item. Without a registry, the extensions of the library are known."""

    def __init__(self, extension_registry: TransformRegistry | None = None) -> None:
        self.extension_registry: TransformRegistry = extension_registry or ExtensionRegistry()

    def transform_load_stream(
        self, read_item: ReadItem, transform_descriptors: Sequence[str], raw_stream: IO[bytes]
    ) -> IO[bytes]:
        """A stream of the item's own bytes: the transform that wrote last is undone first."""
        if not transform_descriptors:
            return raw_stream
        stream = raw_stream
        for extension in reversed(self._extensions(read_item, transform_descriptors)):
            stream = extension.transform_from(stream)
        return stream

    def _extensions(self, read_item: ReadItem, descriptors: Sequence[str]) -> Sequence[StreamTransform]:
        key = read_item.storage_index.fqn
        try:
            return self.extension_registry.from_descriptor_list(descriptors)
        except MissingPackageError as error:
            error.message = f"'{key}' went through {list(descriptors)} when it was saved: {error.message}"
            raise
        except ValueError as error:
            raise HoldfastError(
                f"'{key}' went through {list(descriptors)} when it was saved, which cannot be undone: {error}. Give "
                "the reader an extension registry that knows all of them."
            ) from error


class _KeptOpen(io.RawIOBase):
    """Passes everything on but its end: transforms close what they write to, and a file holds many items."""

    def __init__(self, raw_stream: Any) -> None:
        super().__init__()
        self._raw = raw_stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._raw.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()


class _Chain(io.RawIOBase):
    """Writes to the last of several streams, each of which writes to the one before; all end together."""

    def __init__(self, streams: Sequence[Any]) -> None:
        super().__init__()
        self._streams = streams

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._streams[-1].write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            for stream in reversed(self._streams):
                stream.close()
        super().close()
