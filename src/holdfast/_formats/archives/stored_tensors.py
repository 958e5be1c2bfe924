"""Tensors out of the bytes of an archive: storages are checked once, and tensors are views of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from holdfast._base.crc import crc32
from holdfast._compat.tensors import empty_quantized, empty_quantized_per_channel, negative_view
from holdfast._formats.archives.known_names import AllowedName
from holdfast._formats.archives.tensor_records import StorageRecord, TensorNames, TensorRecord, storage_record
from holdfast._formats.archives.zip_layout import ZipEntry, damaged, read_directory

_NONE: Mapping[str, Any] = {}
_BYTE_ORDERS = ("little", "big")
_ALIGNMENT = 16
"""The largest alignment that any element needs."""


class StoredArchive:
    """A whole archive in memory."""

    def __init__(self, blob: bytes | bytearray | memoryview, *, source: str, key: str | None, verify: bool) -> None:
        self.source = source
        self.key = key
        self._verify = verify
        view = self._view = memoryview(blob).cast("B")
        self._entries = read_directory(
            lambda offset, length: bytes(view[offset : offset + length]), len(view), source=source, key=key
        )

    def pickle(self) -> bytes:
        """The description of the stored object."""
        return bytes(self.content("data.pkl"))

    @cached_property
    def byte_order(self) -> str:
        """The byte order of the storages."""
        if "byteorder" not in self._entries:
            return "little"  # torch before 2.1 did not say, and hardly ever ran on anything else
        order = bytes(self.content("byteorder")).decode("latin-1")
        if order not in _BYTE_ORDERS:
            raise damaged(self.source, self.key, "it has an unknown byte order", " or ".join(_BYTE_ORDERS), order)
        return order

    def check(self) -> None:
        """Compare all entries with what was recorded about them."""
        for name in self._entries:
            self.content(name)

    def content(self, name: str) -> memoryview:
        """The bytes of an entry, in place."""
        entry = self._entries.get(name)
        if entry is None:
            raise damaged(self.source, self.key, "an entry is missing", name, sorted(self._entries)[:10])
        data = self._view[entry.offset : entry.offset + entry.length]
        if self._verify:
            check_crc(data, entry, name, source=self.source, key=self.key)
        return data


def check_crc(data: bytes | memoryview, entry: ZipEntry, name: str, *, source: str, key: str | None) -> None:
    """Compare the content of an entry with what was recorded about it."""
    if entry.crc is not None and (found := crc32(data)) != entry.crc:
        raise damaged(source, key, f"wrong CRC-32 of {name}", f"{entry.crc:08x}", f"{found:08x}")


class StoredTensors:
    """Makes the storages and tensors that the description in an archive refers to.

    With ``share`` they use the archive's own memory, if it may be written to and its elements are aligned.
    """

    def __init__(self, archive: StoredArchive, *, share: bool = False) -> None:
        self._archive = archive
        self._share = share
        # Not `self.tensor`: such a circle keeps the whole archive in memory until the garbage collector comes round.
        this = weakref.ref(self)
        self._names = TensorNames(lambda record, attributes: cast(StoredTensors, this()).tensor(record, attributes))
        self._storages: dict[tuple[str, int], tuple[StorageRecord, torch.UntypedStorage]] = {}

    def find(self, module: str, name: str) -> AllowedName | None:
        """The entry of a name that has to do with tensors."""
        return self._names.find(module, name)

    def reference(self, persistent_id: Any) -> Any:
        """The storage that the description refers to."""
        record = storage_record(persistent_id)
        storage = self._storage(record, record.dtype)
        if record.dtype is None:
            self._names.add_storage(storage, record)
            return storage
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=record.dtype, _internal=True)  # type: ignore[no-untyped-call]
        self._names.add_storage(typed, record)
        return typed

    def tensor(self, record: TensorRecord, attributes: Mapping[str, Any] = _NONE) -> torch.Tensor:
        """The tensor that ``record`` describes, with further attributes that somebody had put onto it."""
        storage = self._storage(record.storage, record.dtype)
        tensor = _empty(record, storage.device)
        tensor.set_(storage, record.storage_offset, record.sizes, record.strides)
        if record.conj:
            tensor = tensor.conj()
        if record.neg:
            tensor = negative_view(tensor)
        if record.is_parameter:
            tensor = torch.nn.Parameter(tensor, record.requires_grad)
        elif record.requires_grad:
            tensor.requires_grad_()
        vars(tensor).update(attributes)
        return tensor

    def _storage(self, record: StorageRecord, dtype: torch.dtype | None) -> torch.UntypedStorage:
        swapped = 1 if self._archive.byte_order == sys.byteorder else _swap_unit(dtype)
        known = self._storages.get((record.key, swapped))
        if known is None:
            data = self._archive.content(f"data/{record.key}")
            storage = _placed(self._bytes(data, swapped), record.location).untyped_storage()
            known = self._storages[record.key, swapped] = record, storage
        if known[1].nbytes() != record.nbytes:
            raise ValueError(f"a storage of {record.nbytes} bytes in {known[1].nbytes()} bytes")
        return known[1]

    def _bytes(self, data: memoryview, swapped: int) -> torch.Tensor:
        if not len(data):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if swapped > 1:
            native = np.frombuffer(data, dtype=f"u{swapped}").byteswap()
            return torch.from_numpy(native.view(np.uint8))
        if self._share and not data.readonly:
            shared = torch.frombuffer(data, dtype=torch.uint8)
            if shared.data_ptr() % _ALIGNMENT == 0:
                return shared
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _swap_unit(dtype: torch.dtype | None) -> int:
    if dtype is None:
        return 1  # decided by each tensor that uses the storage
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _placed(data: torch.Tensor, location: str) -> torch.Tensor:
    """On the device where it was, if there is one here; else on the CPU."""
    try:
        device = torch.device(location)
    except RuntimeError:
        return data
    module = getattr(torch, device.type, None) if device.type not in ("cpu", "meta") else None
    if module is None or not module.is_available() or (device.index or 0) >= module.device_count():
        return data
    return data.to(device)


def _empty(record: TensorRecord, device: torch.device) -> torch.Tensor:
    if record.quantizer is None:
        return torch.empty(0, dtype=record.dtype, device=device)
    scheme, *parameters = record.quantizer
    if scheme is torch.per_tensor_affine:
        scale, zero_point = parameters
        if type(scale) is not float or type(zero_point) is not int:
            raise TypeError("a quantized tensor without scale and zero point")
        return empty_quantized([0], scale=scale, zero_point=zero_point, dtype=record.dtype)
    scales, zero_points, axis = parameters
    if scheme is not torch.per_channel_affine or axis not in range(len(record.sizes)):
        raise TypeError("a tensor quantized in an unknown way")
    if any(not isinstance(part, torch.Tensor) or part.shape != (record.sizes[axis],) for part in (scales, zero_points)):
        raise TypeError("a quantized tensor without a scale and zero point for every channel")
    # One element per channel: the shape is only set together with the storage, and nothing is reserved for it here.
    sizes = [record.sizes[axis] if dimension == axis else 1 for dimension in range(len(record.sizes))]
    return empty_quantized_per_channel(sizes, scales=scales, zero_points=zero_points, axis=axis, dtype=record.dtype)
