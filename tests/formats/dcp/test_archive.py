"""Archives of tensors: torch reads ours, we read torch's, and no damaged byte goes unnoticed."""

from __future__ import annotations

import io
import pathlib
import random
import sys
import warnings
import zipfile
import zlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock_dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.dcp.archive import ALIGNMENT, TensorArchive, describe_tensor, read_directory, read_tensor
from holdfast._formats.dcp.index import encode_index
from holdfast._formats.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast.errors import DamagedCheckpointError, HoldfastError, UnsupportedTensorError
from tests.formats.dcp.blobs import (
    PLAIN_DTYPES,
    QUANTIZED,
    UNKNOWN_TO_TORCH_SAVE,
    assert_same,
    entries_of,
    of_bytes,
    our_blob,
    torch_blob,
    zipped,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:TypedStorage", "ignore:torch.quantize")

SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3), (300, 2), (1, 2, 3, 4, 5)]


def read(blob: bytes | bytearray | memoryview, **options: Any) -> torch.Tensor:
    return read_tensor(blob, source="file", key="key", **options)


def loaded_by_torch(blob: bytes, dtype: str) -> torch.Tensor:
    """Without pickle, unless the installed torch takes the dtype for a danger: 2.6 does so with small integers."""
    harmless = f"torch.{dtype}" in torch._weights_only_unpickler._get_allowed_globals()
    return torch.load(io.BytesIO(blob), weights_only=harmless)


def directory(blob: bytes) -> dict[str, Any]:
    return read_directory(lambda offset, length: blob[offset : offset + length], len(blob), source="file", key="key")


# Writing


@pytest.mark.parametrize("name", PLAIN_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_every_dtype_and_shape_that_we_write(name: str, shape: tuple[int, ...]) -> None:
    tensor = of_bytes(PLAIN_DTYPES[name], shape)
    assert_same(loaded_by_torch(our_blob(tensor), name), tensor)
    assert_same(read(our_blob(tensor)), tensor)


@pytest.mark.parametrize("name", sorted(PLAIN_DTYPES.keys() - UNKNOWN_TO_TORCH_SAVE))
@pytest.mark.parametrize("shape", SHAPES)
def test_our_description_says_what_that_of_torch_says(name: str, shape: tuple[int, ...]) -> None:
    tensor = of_bytes(PLAIN_DTYPES[name], shape)
    ours, theirs = entries_of(our_blob(tensor)), entries_of(torch_blob(tensor))
    assert describe(ours["data.pkl"]) == describe(theirs["data.pkl"])
    assert {part: ours[part] for part in ("data/0", "version", "byteorder")} == {
        part: theirs[part] for part in ("data/0", "version", "byteorder")
    }
    assert_same(read(torch_blob(tensor)), tensor)


def describe(data_pkl: bytes) -> Any:
    return describe_tensor(data_pkl, source="file", key="key")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_refused_because_their_bytes_do_not_say_what_they_are(name: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=name) as caught:
        TensorArchive(QUANTIZED[name], (2,))
    assert caught.value.kind == name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])
def test_lengths_and_alignment_are_known_before_the_bytes_are(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    archive = TensorArchive(dtype, shape)
    assert len(archive.prefix) % ALIGNMENT == 0
    assert archive.payload_length == torch.Size(shape).numel() * dtype.itemsize
    assert archive.total_length == len(our_blob(of_bytes(dtype, shape)))
    assert len(archive.suffix(0)) == len(archive.suffix(0xFFFFFFFF))


@pytest.mark.parametrize("shape", SHAPES)
def test_other_zip_readers_find_nothing_wrong(shape: tuple[int, ...]) -> None:
    with zipfile.ZipFile(io.BytesIO(our_blob(of_bytes(torch.float32, shape)))) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.complex128])
def test_torch_maps_a_file_of_ours_into_memory(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    tensor = of_bytes(dtype, (7, 5))
    (tmp_path / "t.pt").write_bytes(our_blob(tensor))
    mapped = torch.load(tmp_path / "t.pt", mmap=True, weights_only=True)
    assert_same(mapped, tensor)
    assert mapped.data_ptr() % ALIGNMENT == 0


def test_stock_loads_a_checkpoint_made_of_our_blobs_and_index(tmp_path: pathlib.Path) -> None:
    tensors = {"w": of_bytes(torch.float32, (4, 6)), "half": of_bytes(torch.uint16, (3,)), "step": torch.tensor(3)}
    described, places, content = {}, {}, b""
    for fqn, tensor in tensors.items():
        zeros = torch.Size([0] * tensor.dim())
        chunk = ChunkStorageMetadata(zeros, tensor.shape)
        described[fqn] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, [chunk])
        blob = our_blob(tensor)
        places[MetadataIndex(fqn, zeros, 0)] = _StorageInfo("data.distcp", len(content), len(blob))
        content += blob
    (tmp_path / "data.distcp").write_bytes(content)
    (tmp_path / ".metadata").write_bytes(encode_index(Metadata(described, {fqn: (fqn,) for fqn in tensors}, places)))
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock_dcp.load(target, checkpoint_id=tmp_path)
    for fqn, tensor in tensors.items():
        assert_same(target[fqn], tensor)


GIB = 1 << 30
LIMIT = 0xFFFFFFFF


@pytest.mark.parametrize("length", [LIMIT - 10_000, LIMIT - 700, LIMIT - 1, LIMIT, LIMIT + 1, 4 * GIB + 5, 40 * GIB])
def test_archives_around_and_beyond_four_gibibytes_are_sound(tmp_path: pathlib.Path, length: int) -> None:
    archive = TensorArchive(torch.uint8, (length,))
    suffix = archive.suffix(0)
    file = tmp_path / "large.pt"
    with file.open("wb") as stream:  # sparse: nothing of the payload exists
        stream.write(archive.prefix)
        stream.seek(length, io.SEEK_CUR)
        stream.write(suffix)
    assert file.stat().st_size == archive.total_length
    with zipfile.ZipFile(file) as zipped_file:
        info = zipped_file.getinfo("archive/data/0")
        assert (info.file_size, info.header_offset) == (length, archive.prefix.index(b"archive/data/0") - 30)
    with file.open("rb") as stream:

        def read_at(offset: int, count: int) -> bytes:
            stream.seek(offset)
            return stream.read(count)

        entries = read_directory(read_at, archive.total_length, source="file")
    assert entries["data/0"][:2] == (len(archive.prefix), length)
    if length < 5 * GIB:  # a mapping of more may be refused on a small machine
        mapped = torch.load(file, mmap=True, weights_only=True)
        assert mapped.shape == (length,)
        assert mapped[-1] == 0


# Reading what torch wrote


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors as they come: any strides, an offset, steps, expanded dimensions."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.uint16, torch.complex64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = of_bytes(dtype, shape)
    for _ in range(draw(st.integers(0, 3))):
        if tensor.dim() == 0:
            break
        dimension = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["transpose", "slice", "step", "expand", "select", "conj"])):
            case "transpose":
                tensor = tensor.transpose(0, dimension)
            case "slice":
                tensor = tensor.narrow(dimension, min(1, tensor.shape[dimension]), max(0, tensor.shape[dimension] - 1))
            case "step":
                tensor = tensor[(slice(None),) * dimension + (slice(None, None, 2),)]
            case "expand":
                tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
            case "select" if tensor.shape[dimension]:
                tensor = tensor.select(dimension, 0)
            case "conj":
                tensor = tensor.conj()
    return tensor


@given(views(), st.booleans())
@settings(deadline=None)
def test_any_view_that_torch_saved_is_read_with_its_strides(tensor: torch.Tensor, verify: bool) -> None:
    found = read(torch_blob(tensor), verify=verify)
    assert_same(found, tensor)
    assert found.stride() == tensor.stride()
    assert found.is_conj() == tensor.is_conj()


@given(st.lists(st.integers(0, 5), max_size=5), st.sampled_from(sorted(PLAIN_DTYPES)))
@settings(deadline=None)
def test_any_shape_and_dtype_of_ours_is_read_by_both(shape: list[int], name: str) -> None:
    tensor = of_bytes(PLAIN_DTYPES[name], shape)
    assert_same(read(our_blob(tensor)), tensor)
    assert_same(loaded_by_torch(our_blob(tensor), name), tensor)


def test_the_marks_for_conjugate_and_negative_are_kept() -> None:
    tensor = of_bytes(torch.complex64, (3,)).nan_to_num()
    negative = tensor.conj().imag
    assert negative.is_neg()
    for marked in (tensor.conj(), negative):
        found = read(torch_blob(marked))
        assert torch.equal(found, marked)
        assert (found.is_conj(), found.is_neg()) == (marked.is_conj(), marked.is_neg())
        record = describe(entries_of(torch_blob(marked))["data.pkl"])
        assert (record.conj, record.neg) == (marked.is_conj(), marked.is_neg())
        assert not record.is_row_major


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_and_a_tensor_with_attributes_are_read_as_plain_tensors(requires_grad: bool) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0), requires_grad)
    with_attribute = torch.arange(3.0)
    with_attribute.note = "mine"  # type: ignore[attr-defined]
    parameter_with_attribute = torch.nn.Parameter(torch.arange(3.0), requires_grad)
    parameter_with_attribute.note = "mine"  # type: ignore[attr-defined]
    for tensor in (parameter, with_attribute, parameter_with_attribute, torch.arange(3.0, requires_grad=requires_grad)):
        found = read(torch_blob(tensor))
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert_same(found, torch.arange(3.0))
    record = describe(entries_of(torch_blob(parameter))["data.pkl"])
    assert (record.is_parameter, record.requires_grad) == (True, requires_grad)


def test_the_call_of_old_versions_of_torch_is_known() -> None:
    entries = entries_of(torch_blob(torch.arange(6.0).reshape(2, 3)))
    pickled = entries["data.pkl"]
    pickled = pickled.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor")
    end = pickled.index(b"\x89ccollections")  # requires_grad and hooks came with version 2
    entries["data.pkl"] = pickled[:end] + b"tq\x08Rq\x09."
    assert_same(read(zipped(entries)), torch.arange(6.0).reshape(2, 3))


def test_quantized_tensors_that_torch_saved_are_read() -> None:
    values = torch.linspace(-1, 1, 12).reshape(3, 4)
    per_tensor = torch.quantize_per_tensor(values, 0.02, 3, torch.quint8)
    scales, zeros = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64), torch.tensor([0, 1, 2])
    per_channel = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    for tensor in (per_tensor, per_channel):
        found = read(torch_blob(tensor))
        assert torch.equal(found.dequantize(), tensor.dequantize())
        assert found.qscheme() == tensor.qscheme()


@pytest.mark.parametrize("root", ["archive", "checkpoint_12", "with space", "ünïcode"])
def test_the_archives_root_may_have_any_name(root: str, tmp_path: pathlib.Path) -> None:
    tensor = torch.arange(4)
    file = tmp_path / f"{root}.pt"
    torch.save(tensor, file)
    assert_same(read(file.read_bytes()), tensor)
    assert_same(read(zipped(entries_of(torch_blob(tensor)), root)), tensor)


def test_archives_without_crcs_say_so_and_are_read() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        blob = torch_blob(torch.arange(4))
    finally:
        torch.serialization.set_crc32_options(before)
    assert {entry.crc for entry in directory(blob).values()} == {None}
    assert_same(read(blob), torch.arange(4))


def test_recorded_crcs_are_those_of_the_bytes() -> None:
    for blob in (our_blob(torch.arange(4)), torch_blob(torch.arange(4))):
        for name, entry in directory(blob).items():
            content = blob[entry.offset : entry.offset + entry.length]
            assert entry.crc == zlib.crc32(content)
            assert content == entries_of(blob)[name]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int16, torch.bfloat16, torch.complex64, torch.uint32, torch.uint8]
)
def test_the_other_byte_order_is_turned_around(dtype: torch.dtype) -> None:
    tensor = of_bytes(dtype, (5,))
    unit = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    entries = entries_of(torch_blob(tensor))
    payload = entries["data/0"]
    entries["data/0"] = b"".join(payload[at : at + unit][::-1] for at in range(0, len(payload), unit))
    entries["byteorder"] = b"big" if sys.byteorder == "little" else b"little"
    assert_same(read(zipped(entries)), tensor)


def test_an_unknown_byte_order_is_damage_and_none_means_little_endian() -> None:
    entries = entries_of(torch_blob(torch.arange(4)))
    with pytest.raises(DamagedCheckpointError, match="byte order"):
        read(zipped({**entries, "byteorder": b"middle"}))
    del entries["byteorder"]
    assert_same(read(zipped(entries)), torch.arange(4))


# Locating without reading


def test_the_directory_of_a_large_archive_takes_few_small_reads() -> None:
    for blob in (torch_blob(torch.zeros(1 << 20)), our_blob(torch.zeros(1 << 20))):
        reads = []

        def read_at(offset: int, length: int, blob: bytes = blob, reads: list[tuple[int, int]] = reads) -> bytes:
            reads.append((offset, length))
            return blob[offset : offset + length]

        entry = read_directory(read_at, len(blob), source="file")["data/0"]
        assert len(reads) <= 2
        assert sum(length for _, length in reads) <= 8192
        assert blob[entry.offset : entry.offset + entry.length] == bytes(4 << 20)


def test_a_record_tells_where_the_elements_are() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    row = describe(entries_of(torch_blob(base[1:3]))["data.pkl"])
    assert (row.storage_offset, row.sizes, row.strides) == (6, (2, 6), (6, 1))
    assert (row.storage_nbytes, row.dtype, row.storage.key, row.storage.location) == (96, torch.float32, "0", "cpu")
    assert row.is_row_major
    assert not describe(entries_of(torch_blob(base.t()))["data.pkl"]).is_row_major
    assert describe(entries_of(torch_blob(base[:, :0]))["data.pkl"]).is_row_major
    single_row = torch.as_strided(base, (1, 6), (99, 1))  # the stride of a single element means nothing
    assert describe(entries_of(torch_blob(single_row))["data.pkl"]).is_row_major
    assert not describe(entries_of(torch_blob(base[:, :3]))["data.pkl"]).is_row_major


def test_memory_that_may_be_written_to_is_used_and_other_memory_is_copied() -> None:
    blob = bytearray(our_blob(torch.arange(4)))
    shared = read(blob)
    shared[0] = 77
    assert read(blob, verify=False)[0] == 77
    frozen = our_blob(torch.arange(4))
    own = read(frozen)
    own[0] = 77
    assert read(frozen)[0] == 0


def test_memory_that_is_not_aligned_is_copied() -> None:
    blob = bytearray(b"x" + our_blob(torch.arange(4)))
    found = read(memoryview(blob)[1:])
    assert found.data_ptr() % 8 == 0
    assert_same(found, torch.arange(4))


# Damage


def small_blobs() -> dict[str, bytes]:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.float32)
    return {
        "ours": our_blob(tensor),
        "torch": torch_blob(tensor),
        "ours, bytes": our_blob(of_bytes(torch.uint16, (3,))),
    }


@pytest.mark.parametrize("which", small_blobs())
def test_a_blob_that_was_cut_off_anywhere_is_damaged(which: str) -> None:
    blob = small_blobs()[which]
    for length in range(len(blob)):
        with pytest.raises(DamagedCheckpointError) as caught:
            read(blob[:length])
        assert (caught.value.file, caught.value.key) == ("file", "key")
    for front in range(1, 40):
        with pytest.raises(DamagedCheckpointError):
            read(blob[front:])


@pytest.mark.parametrize("which", small_blobs())
def test_every_flipped_bit_is_noticed_or_without_effect(which: str) -> None:
    blob = small_blobs()[which]
    expected = read(blob)
    noticed = 0
    for position in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[position] ^= 1 << bit
            try:
                found = read(damaged)
            except DamagedCheckpointError:
                noticed += 1
            else:
                assert_same(found, expected)
    assert noticed > len(blob)  # most of the others are padding, times and names of versions


def test_every_flipped_bit_of_the_payload_and_the_description_is_noticed() -> None:
    blob = torch_blob(torch.tensor([1.5, -2.0]))
    for name in ("data/0", "data.pkl", "byteorder"):
        entry = directory(blob)[name]
        for position in range(entry.offset, entry.offset + entry.length):
            damaged = bytearray(blob)
            damaged[position] ^= 0x10
            with pytest.raises(DamagedCheckpointError, match=f"CRC-32 of {name}") as caught:
                read(damaged)
            assert caught.value.expected == f"{entry.crc:08x}"
            assert caught.value.found != caught.value.expected


def test_without_verification_the_crc_is_not_looked_at() -> None:
    blob = bytearray(our_blob(torch.arange(4)))
    blob[directory(bytes(blob))["data/0"].offset] ^= 1
    assert read(blob, verify=False)[0] == 1


def test_random_damage_gives_a_tensor_or_one_of_our_errors() -> None:
    chooser = random.Random(1)
    for blob in (*small_blobs().values(), zipped(entries_of(torch_blob(torch.arange(3))))):
        for _ in range(300):
            start = chooser.randrange(len(blob))
            damaged = blob[:start] + chooser.randbytes(chooser.randrange(1, 20)) + blob[start + chooser.randrange(20) :]
            try:
                read(damaged, verify=False)
            except HoldfastError:
                pass


@pytest.mark.parametrize("blob", [b"", b"x", b"PK\x05\x06" + bytes(18), b"\x80\x02}.", bytes(5000)])
def test_something_else_than_an_archive_is_damaged(blob: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        read(blob)


def test_an_archive_of_something_else_than_a_tensor_is_damaged() -> None:
    with pytest.raises(DamagedCheckpointError, match="instead of a tensor"):
        read(torch_blob({"a": 1}))


def test_a_missing_entry_is_named() -> None:
    entries = entries_of(torch_blob(torch.arange(3)))
    for name in ("data.pkl", "data/0"):
        with pytest.raises(DamagedCheckpointError, match=name):
            read(zipped({other: content for other, content in entries.items() if other != name}))


def test_a_compressed_archive_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match="compressed"):
        read(zipped(entries_of(torch_blob(torch.arange(300))), compression=zipfile.ZIP_DEFLATED))
