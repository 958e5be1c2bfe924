"""The index of a checkpoint: which rank has stored which part of the tensors that are divided by no rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast._base.boxes import Box, first_overlap
from holdfast._formats.native.array_files import U32, U64, decode_arrays, encode_arrays
from holdfast._formats.native.blocks import refuse
from holdfast._formats.native.columns import digest_of
from holdfast._formats.native.record import Record
from holdfast._formats.native.shapes import Numbers, TensorShapes
from holdfast._formats.native.stored_parts import PartsByList, StoredParts

_STORED = {"part_tensor": U32, "part_rank": U32, "part_offsets": U64, "part_sizes": U64}


def encode_index(parts: Sequence[StoredParts]) -> bytes | None:
    """The bytes of the index of tensors, given where each of them is stored; None if all follow rules."""
    if PartsByList not in set(map(type, parts)):
        return None
    listed = [(number, stored) for number, stored in enumerate(parts) if isinstance(stored, PartsByList)]
    arrays = {
        "part_tensor": np.concatenate([np.full(len(stored.ranks), number, np.int64) for number, stored in listed]),
        "part_rank": np.concatenate([stored.ranks for _, stored in listed]),
        "part_offsets": np.concatenate([stored.offsets.reshape(-1) for _, stored in listed]),
        "part_sizes": np.concatenate([stored.sizes.reshape(-1) for _, stored in listed]),
    }
    return encode_arrays(arrays, _STORED)


class PartIndex:
    """The parts of tensors that follow no rule, by tensor number."""

    def __init__(self, data: bytes | bytearray, record: Record, shapes: TensorShapes, source: str) -> None:
        """Check the index ``data`` against the record that it belongs to."""
        assert record.index is not None
        if len(data) != record.index.nbytes or digest_of(data) != record.index.digest:
            refuse(source, "is not as it was written: its digest differs", record.index.digest, digest_of(data))
        arrays, _ = decode_arrays(data, _STORED, source)
        self._record = record
        self._source = source
        self._tensor = tensor = arrays["part_tensor"].astype(np.int64)
        self._rank = arrays["part_rank"].astype(np.int64)
        self._offsets, self._sizes = arrays["part_offsets"], arrays["part_sizes"]
        self._proven: set[int] = set()
        if len(self._rank) != len(tensor):
            refuse(source, "has columns of different lengths", len(tensor), len(self._rank))
        if len(tensor) and (np.any(np.diff(tensor) < 0) or int(tensor[-1]) >= len(shapes)):
            refuse(source, "has parts out of order, or of unknown tensors", f"below {len(shapes)}", "others")
        if len(tensor) and int(self._rank.max()) >= record.world_size:
            refuse(source, "has parts of unknown ranks", f"below {record.world_size}", int(self._rank.max()))
        volumes, self._first_number = shapes.volumes(tensor, self._offsets, self._sizes, source)
        self._check_elements(volumes, shapes)

    def _check_elements(self, volumes: Numbers, shapes: TensorShapes) -> None:
        stored = np.zeros(len(shapes), np.int64)
        np.add.at(stored, self._tensor, volumes)
        without_rule = np.asarray(self._record.places.division_of, np.int64) < 0
        wrong = np.flatnonzero(stored != np.where(without_rule, shapes.elements, 0))
        if wrong.size:
            first = int(wrong[0])
            expected = int(shapes.elements[first]) if without_rule[first] else 0
            what = f"does not have all elements of {self._record.tensors[first].key!r} once"
            refuse(self._source, what, expected, int(stored[first]))

    def of(self, tensor: int) -> PartsByList:
        """The parts of a tensor, of which none overlap."""
        first, last = self._tensor.searchsorted((tensor, tensor + 1)).tolist()
        ndim = len(self._record.tensors[tensor].shape)
        numbers = slice(int(self._first_number[first]), int(self._first_number[last]))
        offsets = self._offsets[numbers].reshape(last - first, ndim)
        sizes = self._sizes[numbers].reshape(last - first, ndim)
        if tensor not in self._proven:
            boxes = [Box(tuple(at), tuple(size)) for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
            if len(boxes) > 1 and first_overlap(boxes) is not None:
                refuse(self._source, f"has parts of {self._record.tensors[tensor].key!r} that overlap", "none", "some")
            self._proven.add(tensor)
        return PartsByList(offsets, sizes, self._rank[first:last])
