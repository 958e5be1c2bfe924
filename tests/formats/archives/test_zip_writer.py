"""The container of a torch.save file, read by others: Python's zipfile and torch's own reader."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.archives.zip_writer import ALIGNMENT, ZipWriter

GIB_4 = 1 << 32


@given(
    st.lists(st.tuples(st.text("abcä/.", min_size=1, max_size=90), st.binary(max_size=300)), unique_by=lambda e: e[0])
)
def test_every_entry_comes_back_with_the_right_crc_and_aligned(entries: list[tuple[str, bytes]]) -> None:
    stream = io.BytesIO()
    archive = ZipWriter(stream)
    for name, content in entries:
        archive.add(name, content)
    archive.close()

    with zipfile.ZipFile(stream) as found:
        assert found.testzip() is None
        assert [info.filename for info in found.infolist()] == [f"archive/{name}" for name, _ in entries]
        for info, (name, content) in zip(found.infolist(), entries, strict=True):
            assert found.read(f"archive/{name}") == content
            assert content_position(stream.getvalue(), info) % ALIGNMENT == 0


class Buffers(io.BytesIO):
    """Lends memory of any size for what comes next."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.lent = bytearray()

    def buffer(self) -> memoryview:
        self.lent = bytearray(self.sizes[self.tell() % len(self.sizes)])
        return memoryview(self.lent)

    def advance(self, count: int) -> None:
        self.write(self.lent[:count])


@given(st.lists(st.binary(max_size=300), max_size=4), st.none() | st.lists(st.integers(1, 99), min_size=1))
def test_entries_that_are_made_in_pieces_are_like_others(contents: list[bytes], buffers: list[int] | None) -> None:
    stream = io.BytesIO() if buffers is None else Buffers(buffers)
    archive = ZipWriter(stream)
    for number, content in enumerate(contents):

        def fill(begin: int, memory: memoryview, crc: int, content: bytes = content) -> int:
            memory[:] = content[begin : begin + len(memory)]
            return zlib.crc32(memory, crc)

        archive.add_in_pieces(f"data/{number}", len(content), fill)
        archive.add(f"known {number}", content)
    archive.add("version", b"3\n")
    archive.close()

    with zipfile.ZipFile(stream) as found:
        assert found.testzip() is None
        for number, content in enumerate(contents):
            for name in (f"archive/data/{number}", f"archive/known {number}"):
                assert found.read(name) == content
                assert content_position(stream.getvalue(), found.getinfo(name)) % ALIGNMENT == 0
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(stream.getvalue()))
    assert [reader.get_record(f"data/{number}") for number in range(len(contents))] == contents


def content_position(data: bytes, info: zipfile.ZipInfo) -> int:
    header = data[info.header_offset : info.header_offset + 30]
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def test_entries_behind_4_gib_are_found(tmp_path: Path) -> None:
    path = tmp_path / "far.zip"
    with path.open("wb") as stream:
        ZipWriter(stream).add("first", b"begins like an archive")
        position = stream.seek(GIB_4 + 5)  # a hole, which takes no room on the disk
        archive = ZipWriter(stream, position)
        archive.add("far", b"content")
        archive.add("farther", b"other content")
        archive.add("version", b"3\n")
        archive.close()

    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None
        assert found.read("archive/far") == b"content"
        assert min(info.header_offset for info in found.infolist()) > GIB_4
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("farther") == b"other content"
    assert reader.get_record_offset("farther") % ALIGNMENT == 0


class Sparse(io.RawIOBase):
    """A file that remembers only what is not zero, for entries that are larger than a test should write."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def tell(self) -> int:
        return self.file.tell()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(view) == 1 << 20 and not any(view[:: 1 << 12]):
            self.file.seek(len(view), io.SEEK_CUR)
        else:
            self.file.write(view)
        return len(view)


@pytest.mark.long
def test_an_entry_larger_than_4_gib_is_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "large.zip"
    size = GIB_4 + (1 << 20)
    stream: Any = Sparse(path)
    archive = ZipWriter(stream)
    archive.add_in_pieces("large", size, lambda begin, memory, crc: zlib.crc32(memory, crc))
    archive.add("after", b"it")
    archive.add("version", b"3\n")
    archive.close()
    stream.file.close()

    with zipfile.ZipFile(path) as found:
        assert found.getinfo("archive/large").file_size == size
        assert found.testzip() is None
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("after") == b"it"


def test_more_entries_than_16_bits_can_count(tmp_path: Path) -> None:
    path = tmp_path / "many.zip"
    count = (1 << 16) + 3
    with path.open("wb") as stream:
        archive = ZipWriter(stream)
        for number in range(count):
            archive.add(f"data/{number}", b"%d" % number)
        archive.add("version", b"3\n")
        archive.close()

    with zipfile.ZipFile(path) as found:
        assert len(found.infolist()) == count + 1
        assert found.read(f"archive/data/{count - 1}") == b"%d" % (count - 1)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record(f"data/{count - 1}") == b"%d" % (count - 1)
