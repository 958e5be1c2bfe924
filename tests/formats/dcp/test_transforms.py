"""Transforms between an item and its stored bytes: any number of them, undone in the opposite order."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._dcp.read_items import create_read_item_for_bytes
from holdfast._formats.dcp.metadata import MetadataIndex
from holdfast._formats.dcp.plan import WriteItem, WriteItemType
from holdfast._formats.dcp.transforms import ReaderTransforms, WriterTransforms
from holdfast.errors import HoldfastError
from tests.properties import examples
from tests.torches import stock_module

StockRegistry: Any = stock_module("_extension").ExtensionRegistry
StockExtension: Any = stock_module("_extension").StreamTransformExtension
StockReaderTransforms: Any = stock_module("filesystem")._StorageReaderTransforms
StockWriterTransforms: Any = stock_module("filesystem")._StorageWriterTransforms

WRITE_ITEM = WriteItem(MetadataIndex("key"), WriteItemType.BYTE_IO)
READ_ITEM = create_read_item_for_bytes("key")


class Extension(StockExtension):
    """Written for stock, so that both sides can use it."""

    @classmethod
    def registry_name(cls) -> str:
        return cls.__name__.lower()

    @classmethod
    def from_descriptor(cls, version: str) -> Extension:
        return cls()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"


class Gzip(Extension):
    def transform_to(self, output: IO[bytes]) -> Any:
        return _ClosesBelow(gzip.GzipFile(fileobj=output, mode="wb"), output)

    def transform_from(self, input: IO[bytes]) -> Any:
        return gzip.GzipFile(fileobj=input, mode="rb")


class Deflate(Extension):
    """Writes everything when it is closed, and closes what is below, as stock asks transforms to do."""

    def transform_to(self, output: IO[bytes]) -> Any:
        return _AtOnce(output, zlib.compress)

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(zlib.decompress(input.read()))


class Backwards(Extension):
    def transform_to(self, output: IO[bytes]) -> Any:
        return _AtOnce(output, lambda data: data[::-1])

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(input.read()[::-1])


class Framed(Extension):
    """Puts a mark before and behind."""

    def transform_to(self, output: IO[bytes]) -> Any:
        return _AtOnce(output, lambda data: b"<<" + data + b">")

    def transform_from(self, input: IO[bytes]) -> Any:
        data = input.read()
        assert data.startswith(b"<<")
        assert data.endswith(b">")
        return io.BytesIO(data[2:-1])


class _ClosesBelow(io.RawIOBase):
    def __init__(self, stream: Any, below: Any) -> None:
        self._stream, self._below = stream, below

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._below.close()
        super().close()


class _AtOnce(io.BytesIO):
    def __init__(self, output: Any, function: Any) -> None:
        super().__init__()
        self._output, self._function = output, function

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._function(self.getvalue()))
            self._output.close()
        super().close()


EXTENSIONS = [Gzip, Deflate, Backwards, Framed]
chains = st.lists(st.sampled_from(EXTENSIONS), max_size=4).map(lambda kinds: [kind() for kind in kinds])
contents = st.lists(st.binary(max_size=50), max_size=4)


def registry() -> StockRegistry:
    known = StockRegistry()
    known.extensions.update({kind.registry_name(): kind for kind in EXTENSIONS})
    return known


def written(transforms: Any, parts: list[bytes], raw: io.BytesIO) -> list[str]:
    stream, descriptors = transforms.transform_save_stream(WRITE_ITEM, raw)
    for part in parts:
        stream.write(part)
    stream.close()
    return descriptors


@settings(max_examples=examples(60))
@given(chains, contents)
def test_what_went_through_any_chain_of_transforms_comes_back(chain, parts):
    raw = io.BytesIO()
    descriptors = written(WriterTransforms(chain), parts, raw)
    back = ReaderTransforms(registry()).transform_load_stream(READ_ITEM, descriptors, io.BytesIO(raw.getvalue()))
    assert back.read() == b"".join(parts)


@settings(max_examples=examples(60))
@given(chains, contents)
def test_the_stored_bytes_and_their_description_are_those_of_stock(chain, parts):
    chain = [extension for extension in chain if not isinstance(extension, Gzip)]  # which stores the time
    ours, stock = io.BytesIO(), io.BytesIO()
    assert written(WriterTransforms(chain), parts, ours) == written(StockWriterTransforms(chain), parts, stock)
    assert ours.getvalue() == stock.getvalue()


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_stock_reads_what_went_through_one_transform(kind):
    raw = io.BytesIO()
    descriptors = written(WriterTransforms([kind()]), [b"content" * 10], raw)
    stream = StockReaderTransforms(registry()).transform_load_stream(READ_ITEM, descriptors, io.BytesIO(raw.getvalue()))
    assert stream.read() == b"content" * 10


def test_the_last_transform_sees_the_data_first():
    raw = io.BytesIO()
    assert written(WriterTransforms([Framed(), Backwards()]), [b"abc"], raw) == ["backwards/1", "framed/1"]
    assert raw.getvalue() == b"<<cba>"


@settings(max_examples=examples(30))
@given(chains, st.lists(contents, min_size=2, max_size=4))
def test_the_file_stays_open_for_the_items_that_follow(chain, items):
    raw, spans = io.BytesIO(), []
    transforms = WriterTransforms(chain)
    for parts in items:
        start = raw.tell()
        descriptors = written(transforms, parts, raw)
        spans.append((start, raw.tell(), descriptors))
    assert not raw.closed
    for parts, (start, end, descriptors) in zip(items, spans, strict=True):
        stream = io.BytesIO(raw.getvalue()[start:end])
        back = ReaderTransforms(registry()).transform_load_stream(READ_ITEM, descriptors, stream)
        assert back.read() == b"".join(parts)


def test_without_transforms_bytes_are_stored_as_they_are():
    for none in ([], None):
        raw = io.BytesIO()
        assert written(WriterTransforms(none), [b"ab", b"c"], raw) == []
        assert raw.getvalue() == b"abc"
    stream = io.BytesIO(b"abc")
    assert ReaderTransforms().transform_load_stream(READ_ITEM, [], stream) is stream


def test_transforms_that_the_reader_cannot_find_are_named():
    with pytest.raises(HoldfastError, match=r"'key'.*gzip/1.*registry"):
        ReaderTransforms().transform_load_stream(READ_ITEM, ["gzip/1"], io.BytesIO(b""))
