"""The elements of tensors in a ``torch.save`` file, read piece by piece when they are to be written elsewhere."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from holdfast.boxes import Box
from holdfast.compat.tensors import negative_view
from holdfast.formats.torch_file.reading import OpenTorchFile
from holdfast.storage.blobs import Elements
from holdfast.storage.strided_reads import StridedArray, arrangement_of
from holdfast.tuning import READ_BYTES


class TorchFileElements(Elements):
    """Has one piece in memory at a time, of up to ``memory`` bytes."""

    def __init__(self, file: OpenTorchFile, memory: int) -> None:
        self._file = file
        self._memory = memory
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._until_next = ExitStack()

    def slab_bytes(self, tensor: torch.Tensor) -> int | None:
        """The larger a piece of a turned tensor, the fewer times parts of the file are passed over."""
        if self._file.place_of(tensor) is None:
            return None
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.is_contiguous():
            return min(READ_BYTES, self._memory)
        return self._memory if is_plain else self._memory // 2  # another half for what is computed from it

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """Read a piece, unless it is in memory."""
        found = self._file.place_of(view)
        if found is None:
            return view
        file, position = found
        self._until_next.close()
        repeated = [dim for dim, step in enumerate(view.stride()) if step == 0 and view.shape[dim] > 1]
        if repeated:
            once = view[tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(view.dim()))]
            return self.of(once).expand(view.shape)
        arrangement = arrangement_of(view.shape, view.stride())
        if arrangement is None:  # it is like nothing that slicing and turning could make
            self._until_next.enter_context(self._file.present(view))
            return view
        nbytes = view.numel() * view.dtype.itemsize
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        piece = self._buffer[:nbytes].view(view.dtype).view(view.shape)
        StridedArray(file, position, view.dtype, arrangement).read(
            Box((0,) * view.dim(), tuple(view.shape)), piece, "a tensor of the file"
        )
        if view.is_conj():
            piece = piece.conj()
        return negative_view(piece) if view.is_neg() else piece
