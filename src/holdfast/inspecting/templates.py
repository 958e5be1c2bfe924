"""A checkpoint as a state to load into: its containers and values, with tensors that take addresses and no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.formats.native.numpy_types import numpy_dtype_from
from holdfast.formats.native.refs import PerRankValues, TensorRef
from holdfast.formats.native.torch_elements import torch_dtype
from holdfast.formats.native.trees import mapped, refs_in
from holdfast.formats.torch_file.reserved_memory import reserved
from holdfast.sources.source import Source
from holdfast.states.per_rank import PerRank

_ALIGNMENT = 64


def template_of(source: Source) -> Any:
    """A state like the one that was saved. Its tensors must not be written to, and hold zeros.

    What every rank had its own of is what the first rank had, and takes whatever the first of others had.
    """
    tree = _of_one_rank(source.tree)
    memory = _Addresses(
        sum(_aligned(ref.nbytes) for ref in {ref.key: ref for ref in refs_in(_unmarked(tree))}.values())
    )
    return _filled(tree, memory)


def _of_one_rank(tree: Any) -> Any:
    if isinstance(tree, PerRankValues):
        return PerRank(_of_one_rank(tree.ranks[0]), on_resize="first")
    return tree if isinstance(tree, TensorRef) else mapped(tree, _of_one_rank)


def _unmarked(tree: Any) -> Any:
    if isinstance(tree, PerRank):
        return _unmarked(tree.value)
    return tree if isinstance(tree, TensorRef) else mapped(tree, _unmarked)


def _filled(tree: Any, memory: _Addresses) -> Any:
    if isinstance(tree, PerRank):
        return PerRank(_filled(tree.value, memory), on_resize="first")
    if isinstance(tree, TensorRef):
        return memory.tensor(tree)
    return mapped(tree, lambda child: _filled(child, memory))


class _Addresses:
    """A range of addresses without memory behind it, out of which tensors are made. Tied ones are one."""

    def __init__(self, nbytes: int) -> None:
        self._memory = reserved(max(1, nbytes))
        self._used = 0
        self._made: dict[str, Any] = {}

    def tensor(self, ref: TensorRef) -> Any:
        """The tensor, or numpy array, for a stored one."""
        if ref.key not in self._made:
            self._made[ref.key] = self._array(ref) if _is_numpy(ref) else self._tensor(ref)
            self._used += _aligned(ref.nbytes)
        return self._made[ref.key]

    def _array(self, ref: TensorRef) -> Any:
        dtype = ref.dtype.carrier if ref.numpy is None else numpy_dtype_from(ref.numpy)
        return np.ndarray(ref.shape, dtype, self._memory, self._used if ref.nbytes else 0)

    def _tensor(self, ref: TensorRef) -> Any:
        dtype = torch_dtype(ref.dtype)
        assert dtype is not None
        if not ref.nbytes:
            return torch.empty(ref.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=ref.nbytes, offset=self._used)
        return flat.view(dtype).reshape(ref.shape)


def _is_numpy(ref: TensorRef) -> bool:
    return ref.numpy is not None or torch_dtype(ref.dtype) is None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
