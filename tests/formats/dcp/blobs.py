"""Blobs of both libraries for the tests, and tensors compared bit by bit."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._formats.dcp.archive import TensorArchive

ALL_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
QUANTIZED = {name: dtype for name, dtype in ALL_DTYPES.items() if name.startswith(("qint", "quint"))}
PLAIN_DTYPES = {name: dtype for name, dtype in ALL_DTYPES.items() if name not in QUANTIZED}
# torch.save knows neither these dtypes nor a way to store them; torch.load does.
UNKNOWN_TO_TORCH_SAVE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}


def of_bytes(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with bytes of all kinds, whatever they mean in its dtype."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 37 + 11).remainder(251).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, torch.Size(shape))


def row_major_bytes(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    count = flat.numel() * flat.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(
        flat.untyped_storage(), flat.storage_offset() * flat.element_size(), (count,)
    )
    return bytes(raw.numpy())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert row_major_bytes(found) == row_major_bytes(expected)


def our_blob(tensor: torch.Tensor) -> bytes:
    raw = row_major_bytes(tensor)
    archive = TensorArchive(tensor.dtype, tuple(tensor.shape))
    return archive.prefix + raw + archive.suffix(zlib.crc32(raw))


def torch_blob(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def entries_of(blob: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return {name.removeprefix("archive/"): archive.read(name) for name in archive.namelist()}


def zipped(entries: dict[str, bytes], root: str = "archive", compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with any content, and CRCs that fit it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(f"{root}/{name}", content)
    return stream.getvalue()
