"""A window of a stream behaves like a stream that holds just those bytes."""

from __future__ import annotations

import array
import io
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast._stores.filesystem import ReaderView
from tests.properties import examples


class Watched(io.BytesIO):
    """A stream that remembers which of its bytes were asked for."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.asked: list[tuple[int, int]] = []

    def read(self, size=-1):
        self.asked.append((self.tell(), len(self.getvalue()) if size is None or size < 0 else size))
        return super().read(size)

    def readinto(self, buffer):
        self.asked.append((self.tell(), memoryview(buffer).nbytes))
        return super().readinto(buffer)


@st.composite
def windows(draw) -> tuple[bytes, int, int]:
    content = draw(st.binary(max_size=40) | st.lists(st.sampled_from([b"ab", b"\n", b"c\n"])).map(b"".join))
    offset = draw(st.integers(0, len(content)))
    return content, offset, draw(st.integers(0, len(content) - offset))


operations = st.one_of(
    st.tuples(st.just("read"), st.sampled_from([None, -1, 0]) | st.integers(-2, 50)),
    st.tuples(st.just("readinto"), st.integers(0, 50)),
    st.tuples(st.just("seek"), st.integers(0, 60), st.just(os.SEEK_SET)),
    st.tuples(st.just("seek"), st.integers(-20, 20), st.just(os.SEEK_CUR)),
    st.tuples(st.just("seek"), st.integers(-20, 20), st.just(os.SEEK_END)),
    st.tuples(st.just("tell")),
    st.tuples(st.just("readline"), st.integers(-1, 10)),
    st.tuples(st.just("readlines")),
    st.tuples(st.just("move the base"), st.integers(0, 60)),
)


def target_of(stream: io.BytesIO, offset: int, whence: int) -> int:
    return {os.SEEK_SET: 0, os.SEEK_CUR: stream.tell(), os.SEEK_END: len(stream.getvalue())}[whence] + offset


@settings(max_examples=examples(300))
@given(windows(), st.lists(operations, max_size=12))
@example((b"0123456789", 2, 5), [("seek", -3, os.SEEK_END), ("read", None)])
@example((b"0123456789", 2, 5), [("read", 0), ("read", 1), ("read", 0), ("readinto", 0)])
@example((b"0123456789", 2, 5), [("seek", 50, os.SEEK_SET), ("read", 3), ("readinto", 3), ("tell",)])
def test_every_operation_does_what_it_does_on_a_stream_of_just_these_bytes(window, script):
    content, offset, length = window
    base = Watched(content)
    view, model = ReaderView(base, offset, length), io.BytesIO(content[offset : offset + length])
    for name, *args in script:
        if name == "move the base":
            base.seek(args[0])
        elif name == "readinto":
            ours, expected = bytearray(args[0]), bytearray(args[0])
            assert view.readinto(ours) == model.readinto(expected)
            assert ours == expected
        elif name == "seek" and target_of(model, *args) < 0:
            # io.BytesIO goes to the start then, files refuse. So do windows.
            with pytest.raises(ValueError, match="before the start"):
                view.seek(*args)
        else:
            assert getattr(view, name)(*args) == getattr(model, name)(*args)
        assert view.tell() == model.tell()
    for start, size in base.asked:
        assert offset <= start <= start + size <= offset + length


@settings(max_examples=examples(50))
@given(windows(), windows(), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=10))
def test_two_windows_of_one_stream_do_not_disturb_each_other(one, other, script):
    content = one[0] + other[0]
    base = io.BytesIO(content)
    spans = [one[1:], (len(one[0]) + other[1], other[2])]
    views = [ReaderView(base, *span) for span in spans]
    models = [io.BytesIO(content[offset : offset + length]) for offset, length in spans]
    for which, size in script:
        assert views[which].read(size) == models[which].read(size)


@settings(max_examples=examples(50))
@given(windows(), st.integers(1, 10))
def test_a_window_that_reaches_beyond_its_stream_ends_where_the_stream_does(window, excess):
    content, offset, _ = window
    view = ReaderView(io.BytesIO(content), offset, len(content) - offset + excess)
    assert view.read() == content[offset:]
    assert view.read() == b""
    assert view.readinto(bytearray(5)) == 0
    assert view.tell() == len(content) - offset


def test_a_window_of_a_file_reads_it_in_lines(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"before\none\ntwo\nthree")
    with file.open("rb") as stream:
        assert list(ReaderView(stream, 7, 9)) == [b"one\n", b"two\n", b"t"]


def test_buffers_of_wider_elements_are_filled_by_bytes():
    numbers = array.array("i", [1, 2, 3])
    view = ReaderView(io.BytesIO(b"x" + numbers.tobytes()), 1, numbers.itemsize * 2)
    into = array.array("i", [0, 0, 0])
    assert view.readinto(into) == numbers.itemsize * 2
    assert into == array.array("i", [1, 2, 0])


def test_tensors_are_loaded_from_windows_of_one_file(tmp_path):
    file, spans = tmp_path / "file", []
    tensors = [torch.arange(5), torch.rand(3, 4), torch.tensor(7.0)]
    with file.open("wb") as stream:
        for tensor in tensors:
            start = stream.tell()
            torch.save(tensor, stream)
            spans.append((start, stream.tell() - start))
    with file.open("rb") as stream:
        for tensor, span in reversed(list(zip(tensors, spans, strict=True))):
            assert torch.equal(torch.load(ReaderView(stream, *span), weights_only=True), tensor)


def test_a_window_says_what_its_stream_can_do(tmp_path):
    view = ReaderView(io.BytesIO(b"abc"), 0, 3)
    assert (view.readable(), view.seekable(), view.writable()) == (True, True, False)
    with (tmp_path / "file").open("wb") as only_for_writing:
        assert not ReaderView(only_for_writing, 0, 0).readable()


def test_an_unknown_kind_of_seek_is_refused():
    with pytest.raises(ValueError, match="whence"):
        ReaderView(io.BytesIO(b"abc"), 0, 3).seek(0, 7)


def test_closing_a_window_leaves_its_stream_open():
    base = io.BytesIO(b"abc")
    ReaderView(base, 0, 3).close()
    assert base.read() == b"abc"
