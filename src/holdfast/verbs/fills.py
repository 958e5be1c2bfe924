"""Tensors of a state that are to be filled.

Nearly all of most states take what is stored for them byte by byte. Those are kept as columns and handled all at once,
since there may be very many of them, and small ones. Whatever is special about a tensor makes it a ``Fill`` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.errors import UnsupportedTensorError
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.torch_elements import torch_dtype
from holdfast.planning.small_tensors import has_its_memory
from holdfast.sources.source import WholeReads

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

Numbers = npt.NDArray[np.int64]


@dataclass
class Fill:
    """A tensor or array of the state, and the stored tensor that goes into it."""

    key: str
    ref: TensorRef
    target: Any


@dataclass
class DenseFills:
    """Columns of what is to be filled: keys of the state, what is stored, and the tensors."""

    keys: list[str] = field(default_factory=list)
    refs: list[TensorRef] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    _types: dict[str, torch.dtype | None] = field(default_factory=dict)

    def take(self, key: str, ref: TensorRef, target: torch.Tensor) -> bool:
        """Add a tensor if its memory is just what is stored: in host memory, whole, without gaps, of the same type."""
        name = ref.dtype.name
        if name not in self._types:
            found = torch_dtype(ref.dtype)
            self._types[name] = None if found is None or found.is_complex else found
        fits = (
            target.dtype is self._types[name]
            and target.is_cpu
            and not target.is_nested
            and target.layout is torch.strided
            and target.shape == ref.shape
            and target.is_contiguous()
            and not target.is_neg()
            and ref.numpy is None
            and 0 not in ref.shape
            and has_its_memory(target)
        )
        if fits:
            self.keys.append(key)
            self.refs.append(ref)
            self.targets.append(target)
        return fits

    def fills(self) -> list[Fill]:
        """The same, one by one."""
        return list(map(Fill, self.keys, self.refs, self.targets))

    def without(self, positions: Sequence[int]) -> tuple[DenseFills, list[Fill]]:
        """All but some, and those."""
        if not len(positions):
            return self, []
        fills = self.fills()
        out = set(positions)
        kept = [fill for position, fill in enumerate(fills) if position not in out]
        columns = DenseFills([f.key for f in kept], [f.ref for f in kept], [f.target for f in kept], self._types)
        return columns, [fills[position] for position in sorted(out)]

    @cached_property
    def reads(self) -> WholeReads:
        """Where all of them go, when there are no more to come. The tensors must stay alive until that is done."""
        count = len(self.targets)
        addresses = np.fromiter((tensor.data_ptr() for tensor in self.targets), np.int64, count)
        if not addresses.all():
            raise _lost_memory(self.keys[int(np.argmin(addresses))])
        nbytes = np.fromiter((tensor.nbytes for tensor in self.targets), np.int64, count)
        return WholeReads([ref.key for ref in self.refs], addresses, nbytes)

    @property
    def elements(self) -> int:
        """How many there are in all."""
        return sum(tensor.numel() for tensor in self.targets)

    def count_change(self) -> None:
        """Let autograd know that they were changed."""
        torch.autograd.graph.increment_version([tensor for tensor in self.targets if not tensor.is_inference()])


def _lost_memory(key: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"'{key}' has lost its memory while the state was being looked at, perhaps to a hook of another object's "
        "state_dict. Nothing was changed.",
        key=key,
        kind="a tensor whose memory was given back",
    )


def sharing(begin: Numbers, end: Numbers, others: Sequence[tuple[int, int]]) -> list[int]:
    """Which of these parts of memory overlap each other or one of the others, by position.

    >>> sharing(np.array([0, 8, 20]), np.array([8, 12, 30]), [(11, 13)])
    [1]
    """
    count = len(begin)
    if others:
        extra = np.array(others, np.int64)
        begin, end = np.concatenate([begin, extra[:, 0]]), np.concatenate([end, extra[:, 1]])
    if not len(begin):
        return []
    order = np.argsort(begin, kind="stable")
    low, reach = begin[order], np.maximum.accumulate(end[order])
    overlaps = np.zeros(len(order), np.bool_)
    overlaps[1:] = low[1:] < reach[:-1]
    overlaps[:-1] |= low[1:] < end[order][:-1]
    found: list[int] = np.sort(order[overlaps]).tolist()
    return [position for position in found if position < count]
