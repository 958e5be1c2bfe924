"""Extensions: compressed checkpoints, exchanged with stock, damaged, and in any combination."""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st

import holdfast.dcp as dcp
from holdfast.dcp._extension import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard
from holdfast.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from holdfast.dcp.filesystem import _StorageWriterTransforms
from holdfast.errors import CheckpointException, DamagedCheckpointError, HoldfastError, MissingPackageError
from tests.dcp.states import LIBRARIES
from tests.torches import stock_module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call

stock_extension = stock_module("_extension")
PACKAGES = ["zstandard", "pyzstd"]


class Xor(StreamTransformExtension):
    """Stands for encryption: compressing what comes out of it would not help."""

    @staticmethod
    def registry_name() -> str:
        return "test.xor"

    @staticmethod
    def from_descriptor(version: str) -> Xor:
        assert version == "1"
        return Xor()

    def get_descriptor(self) -> str:
        return "test.xor/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        return _Mapped(output)

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(bytes(byte ^ 0x55 for byte in input.read()))


class _Mapped(io.RawIOBase):
    def __init__(self, output: Any) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(byte ^ 0x55 for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self._output.close()  # as stock asks
        super().close()


class Framed(Xor):
    """Adds bytes, so that its place in a chain matters."""

    @staticmethod
    def registry_name() -> str:
        return "test.framed"

    @staticmethod
    def from_descriptor(version: str) -> Framed:
        return Framed()

    def get_descriptor(self) -> str:
        return "test.framed"  # a descriptor without a version

    def transform_to(self, output: IO[bytes]) -> Any:
        output.write(b"frame:")
        return _Passed(output)

    def transform_from(self, input: IO[bytes]) -> Any:
        if input.read(6) != b"frame:":
            raise ValueError("no frame")
        return input


class _Passed(_Mapped):
    def write(self, data: Any) -> int:
        self._output.write(bytes(data))
        return memoryview(data).nbytes


class StockXor(Xor, stock_extension.StreamTransformExtension):
    """The same for stock, which passes over what is not of its own classes."""

    @staticmethod
    def from_descriptor(version: str) -> StockXor:
        return StockXor()


def registry() -> ExtensionRegistry:
    known = ExtensionRegistry()
    known.register(Xor)
    known.register(Framed)
    return known


def stock_registry() -> Any:
    known = stock_extension.ExtensionRegistry()
    known.register(StockXor)
    return known


def state() -> dict[str, Any]:
    return {
        "weights": torch.arange(6000.0).reshape(30, 200),
        "zeros": torch.zeros(100_000, dtype=torch.int8),
        "none": torch.empty(0, 3),
        "value": {"step": 7, "text": "x" * 1000},
    }


def blank() -> dict[str, Any]:
    return {
        "weights": torch.ones(30, 200),
        "zeros": torch.ones(100_000, dtype=torch.int8),
        "none": torch.empty(0, 3),
        "value": {"step": 0, "text": ""},
    }


def assert_loaded(found: dict[str, Any]) -> None:
    expected = state()
    assert torch.equal(found["weights"], expected["weights"])
    assert torch.equal(found["zeros"], expected["zeros"])
    assert found["value"] == expected["value"]


def save(path: Any, extensions: list[Any]) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path, _extensions=extensions))


def load(path: Any, **options: Any) -> dict[str, Any]:
    found = blank()
    dcp.load(found, storage_reader=dcp.FileSystemReader(path, **options))
    return found


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each package, with the other one out of reach."""
    pytest.importorskip(request.param, reason=f"NO TEST OF COMPRESSION WITH {request.param}: pip install -e '.[dev]'")
    for other in PACKAGES:
        if other != request.param:
            monkeypatch.setitem(sys.modules, other, None)
    return request.param


# --- compressed checkpoints --------------------------------------------------------------------------------------


def test_a_compressed_checkpoint_loads_without_saying_so(tmp_path, package):
    save(tmp_path / "plain", [])
    save(tmp_path / "small", [ZStandard()])
    assert_loaded(load(tmp_path / "small"))
    plain, small = (sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("plain", "small"))
    assert small < plain / 2


def test_one_package_reads_what_the_other_wrote(tmp_path, monkeypatch):
    for writing, reading in [PACKAGES, PACKAGES[::-1]]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, reading, None)
            save(tmp_path / writing, [ZStandard()])
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, writing, None)
            assert_loaded(load(tmp_path / writing))


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_stock_and_ours_read_what_the_other_compressed(tmp_path, saver):
    writers = {
        "ours": lambda: dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]),
        "stock": lambda: stock.FileSystemWriter(tmp_path, _extensions=[stock_extension.ZStandard()]),
    }
    LIBRARIES[saver].save(state(), storage_writer=writers[saver]())
    found = blank()
    LIBRARIES["stock" if saver == "ours" else "ours"].load(found, checkpoint_id=tmp_path)
    assert_loaded(found)


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_stock_and_ours_read_what_went_through_an_extension_of_the_user(tmp_path, saver):
    writer = LIBRARIES[saver].FileSystemWriter(tmp_path, _extensions=[Xor()])
    LIBRARIES[saver].save(state(), storage_writer=writer)
    other = LIBRARIES["stock" if saver == "ours" else "ours"]
    known = stock_registry() if saver == "ours" else registry()
    found = blank()
    other.load(found, storage_reader=other.FileSystemReader(tmp_path, _extension_registry=known))
    assert_loaded(found)


CHAINS = [[Xor, ZStandard], [ZStandard, Xor], [Framed, ZStandard, Xor], [ZStandard, Framed], [Xor, Framed, Xor]]


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(kind.__name__ for kind in chain))
def test_several_extensions_are_undone_whoever_wrote_them(tmp_path, chain, saver):
    """Stock undoes them in the order in which they were done."""
    writer = LIBRARIES[saver].FileSystemWriter(tmp_path, _extensions=[kind() for kind in chain])
    LIBRARIES[saver].save(state(), storage_writer=writer)
    assert_loaded(load(tmp_path, _extension_registry=registry()))


def test_extensions_work_at_urls():
    url = f"memory://{uuid4().hex}"
    dcp.save(state(), storage_writer=FsspecWriter(url, _extensions=[Xor(), ZStandard()]))
    found = blank()
    dcp.load(found, storage_reader=FsspecReader(url, _extension_registry=registry()))
    assert_loaded(found)


def save_on_ranks(path: Path) -> dict[str, Any]:
    save(path, [ZStandard()])
    return load(path)


def test_ranks_save_and_load_compressed_checkpoints(ranks, tmp_path):
    for found in ranks(2).run(save_on_ranks, tmp_path):
        assert_loaded(found)


# --- damage ------------------------------------------------------------------------------------------------------


def stored(path: Path) -> tuple[Path, Any]:
    """The data file, and where the weights are in it."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    info = infos["weights"]
    return path / info.relative_path, info


def the_error(path: Path, **options: Any) -> Exception:
    with pytest.raises(CheckpointException) as caught:
        load(path, **options)
    error, _ = caught.value.failures[0]
    return error


def corrupt(path: Path, position: int) -> None:
    file, info = stored(path)
    content = bytearray(file.read_bytes())
    content[info.offset + position] ^= 0xFF
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("position", [0, 5, 100, 1000, -1])
def test_damage_of_compressed_bytes_is_noticed_by_the_seal(tmp_path, position):
    save(tmp_path, [ZStandard()])
    corrupt(tmp_path, position % stored(tmp_path)[1].length)
    error = the_error(tmp_path)
    assert isinstance(error, DamagedCheckpointError)
    assert "CRC" in str(error)


@pytest.mark.parametrize("position", [0, 5, 100, 1000, -1])
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_damage_that_no_seal_covers_is_noticed_when_it_is_decompressed(tmp_path, saver, position, package):
    if saver == "ours":
        save(tmp_path, [ZStandard()])
    else:
        extensions = [ZStandard()]  # with a checksum; stock's own writes none
        stock.save(state(), storage_writer=stock.FileSystemWriter(tmp_path, _extensions=extensions))
    corrupt(tmp_path, position % stored(tmp_path)[1].length)
    error = the_error(tmp_path, verify=False)
    assert isinstance(error, DamagedCheckpointError)
    assert (error.file, error.key) == (str(stored(tmp_path)[0]), "weights")
    assert "stream.zstd/1" in str(error)
    assert "Copy the file again" in str(error)


def test_bytes_that_stock_compressed_are_checked_by_the_archive_inside(tmp_path):
    class Flipped(ZStandard):
        """Damages what comes out of it, in the middle of the elements."""

        def transform_from(self, input: IO[bytes]) -> Any:
            content = bytearray(super().transform_from(input).read())
            content[len(content) // 2] ^= 1
            return io.BytesIO(bytes(content))

    writer = stock.FileSystemWriter(tmp_path, _extensions=[stock_extension.ZStandard()])
    stock.save({"weights": state()["weights"]}, storage_writer=writer)
    known = ExtensionRegistry()
    known.extensions["stream.zstd"] = type("Known", (), {"from_descriptor": staticmethod(lambda version: Flipped())})
    found = {"weights": blank()["weights"]}
    with pytest.raises(CheckpointException, match="weights"):
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path, _extension_registry=known))
    assert torch.equal(found["weights"], blank()["weights"])


def test_an_extension_that_raises_on_construction_of_its_stream_is_damage_too(tmp_path):
    class Strict(Framed):
        def transform_to(self, output: IO[bytes]) -> Any:
            return _Passed(output)

    save(tmp_path, [Strict()])  # without the frame that reading expects
    error = the_error(tmp_path, _extension_registry=registry())
    assert isinstance(error, DamagedCheckpointError)
    assert "no frame" in str(error)


# --- the stream --------------------------------------------------------------------------------------------------


def compressed(*parts: bytes) -> bytes:
    raw = io.BytesIO()
    stream, _ = _StorageWriterTransforms([ZStandard()]).transform_save_stream(None, raw)  # type: ignore[arg-type]
    for part in parts:
        stream.write(part)
    stream.close()
    return raw.getvalue()


@given(
    st.lists(st.binary(max_size=300), max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 9, 19]),
)
def test_frames_of_every_kind_of_header_are_read(contents, checksum, size, single, level):
    zstandard = pytest.importorskip("zstandard")
    stored = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=size)
    frames = []
    for content in contents:
        if single:
            frames.append(stored.compress(content * 40))
        else:
            frame = stored.compressobj()
            frames.append(frame.compress(content * 40) + frame.flush())
        frames.append(b"\x5a\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content)  # to be skipped
    stream = ZStandard().transform_from(io.BytesIO(b"".join(frames)))
    assert stream.read() == b"".join(content * 40 for content in contents)


def test_large_frames_of_real_data_are_read():
    content = torch.randn(700_000, generator=torch.Generator().manual_seed(0)).numpy().tobytes() + bytes(3_000_000)
    assert ZStandard().transform_from(io.BytesIO(compressed(content))).read() == content


@given(st.lists(st.binary(max_size=300), max_size=4), st.integers(1, 400))
def test_whatever_is_written_is_read_in_pieces_of_any_size(parts, size):
    stream = ZStandard().transform_from(io.BytesIO(compressed(*parts)))
    assert b"".join(iter(lambda: stream.read(size), b"")) == b"".join(parts)
    whole = ZStandard().transform_from(io.BytesIO(compressed(*parts)))
    assert whole.read() == b"".join(parts)


@given(st.binary(max_size=600).map(lambda data: data * 3), st.data())
def test_compressed_bytes_that_are_cut_off_are_never_taken_for_whole(content, data):
    whole = compressed(content)
    cut = data.draw(st.integers(1, len(whole) - 1))
    stream = ZStandard().transform_from(io.BytesIO(whole[:cut]))
    with pytest.raises(Exception, match="too early"):
        stream.read()


def test_a_cut_off_stream_is_noticed_by_either_package(package):
    whole = compressed(b"content" * 1000)
    for cut in range(1, len(whole)):
        stream = ZStandard().transform_from(io.BytesIO(whole[:cut]))
        with pytest.raises(Exception, match=r"(?i)early|ended|error|end-of"):
            stream.read()


def test_decompressing_takes_little_memory_however_much_comes_out(package):
    large = compressed(*[bytes(1 << 20)] * 200)
    assert len(large) < 1 << 16
    stream = ZStandard().transform_from(io.BytesIO(large))
    tracemalloc.start()
    try:
        total = sum(len(piece) for piece in iter(lambda: stream.read(1 << 20), b""))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 200 << 20
    assert peak < 20 << 20


def test_streams_to_write_to_can_be_buffered():
    """Stock's say that they are not writable, which buffers refuse."""
    raw = io.BytesIO()
    stream, _ = _StorageWriterTransforms([Xor()]).transform_save_stream(None, raw)  # type: ignore[arg-type]
    assert stream.writable()
    with io.BufferedWriter(stream) as buffered:  # type: ignore[type-var]
        buffered.write(b"content")
    assert raw.getvalue() == bytes(byte ^ 0x55 for byte in b"content")

    class Buffers(Xor):
        def transform_to(self, output: Any) -> Any:
            return io.BufferedWriter(output)

    raw = io.BytesIO()
    stream, _ = _StorageWriterTransforms([Buffers()]).transform_save_stream(None, raw)  # type: ignore[arg-type]
    stream.write(b"content")
    stream.close()
    assert raw.getvalue() == b"content"


# --- the registry ------------------------------------------------------------------------------------------------


def test_names_and_descriptors_are_those_of_stock():
    assert ZStandard.registry_name() == stock_extension.ZStandard.registry_name()
    assert ZStandard().get_descriptor() == stock_extension.ZStandard().get_descriptor()
    assert ZStandard.is_available()
    assert list(ExtensionRegistry().extensions) == list(stock_extension.ExtensionRegistry().extensions)
    assert issubclass(ZStandard, StreamTransformExtension)
    assert issubclass(StreamTransformExtension, Extension)


def test_extensions_are_found_in_the_order_of_their_descriptors():
    found = registry().from_descriptor_list(["test.xor/1", "stream.zstd/1", "test.framed", "test.xor/1"])
    assert [type(extension) for extension in found] == [Xor, ZStandard, Framed, Xor]


@pytest.mark.parametrize("descriptor", ["stream.zstd", "stream.zstd/", "stream.zstd/1", "stream.zstd/1.0"])
def test_a_descriptor_without_a_version_means_the_first(descriptor):
    (extension,) = ExtensionRegistry().from_descriptor_list([descriptor])
    assert isinstance(extension, ZStandard)


def test_unknown_names_and_versions_are_errors_as_in_stock():
    for kind in (ExtensionRegistry, stock_extension.ExtensionRegistry):
        with pytest.raises(ValueError, match=r"Unknown extension name='other'"):
            kind().from_descriptor_list(["stream.zstd/1", "other/1"])
        with pytest.raises(ValueError, match=r"Unknown extension version='2'"):
            kind().from_descriptor_list(["stream.zstd/2"])


def test_a_registered_extension_replaces_one_of_the_same_name():
    class Own(ZStandard):
        @staticmethod
        def from_descriptor(version: str) -> ZStandard:
            return Own()

    known = ExtensionRegistry()
    known.register(Own)
    assert type(known.from_descriptor_list(["stream.zstd/1"])[0]) is Own
    assert type(ExtensionRegistry().from_descriptor_list(["stream.zstd/1"])[0]) is ZStandard


def test_without_a_package_the_error_says_which_to_install(tmp_path, monkeypatch):
    save(tmp_path, [ZStandard()])
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert not ZStandard.is_available()
    with pytest.raises(ValueError, match=r"zstandard.*pip install 'holdfast\[zstd\]'"):
        ZStandard()
    error = the_error(tmp_path)
    assert isinstance(error, HoldfastError)
    assert not isinstance(error, DamagedCheckpointError)
    assert "holdfast[zstd]" in str(error)
    assert "registry" not in str(error)  # which would not help
    assert isinstance(pickle.loads(pickle.dumps(error)), MissingPackageError)


class OtherContent(dcp.FileSystemReader):
    """The only item of the checkpoint is something else, as one may let it be who wants to harm its reader."""

    content = b""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        for index, info in metadata.storage_data.items():
            (Path(self.path) / info.relative_path).write_bytes(self.content)
            metadata.storage_data[index] = dataclasses.replace(info, offset=0, length=len(self.content), seal=None)
        return metadata


@pytest.mark.parametrize("value", [torch.ones(3), "a value"])
def test_what_decompresses_to_more_than_the_index_promises_is_refused_early(tmp_path, monkeypatch, package, value):
    monkeypatch.setattr("holdfast._dcp.blob_contents._LARGEST_VALUE", 1 << 20)
    monkeypatch.setattr("holdfast._dcp.blob_contents._LARGEST_RATIO", 1)
    dcp.save({"w": value}, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    reader = OtherContent(tmp_path)
    reader.content = compressed(*[bytes(1 << 20)] * 64)
    blank = {"w": torch.zeros(3) if isinstance(value, torch.Tensor) else ""}

    tracemalloc.start()
    try:
        with pytest.raises(CheckpointException) as caught:
            dcp.load(blank, storage_reader=reader)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    error, _ = caught.value.failures[0]
    assert isinstance(error, DamagedCheckpointError)
    assert error.key == "w"
    assert "more than the" in str(error)
    assert peak < 16 << 20


def test_an_extension_that_the_reader_does_not_know_is_named_with_its_item(tmp_path):
    save(tmp_path, [Xor()])
    error = the_error(tmp_path)
    assert isinstance(error, HoldfastError)
    assert "test.xor/1" in str(error)
    assert "registry" in str(error)


def test_the_checksum_of_a_frame_is_written(package):
    whole = compressed(b"content")
    frame_header_descriptor = whole[4]
    assert frame_header_descriptor & 0b100  # Content_Checksum_flag
