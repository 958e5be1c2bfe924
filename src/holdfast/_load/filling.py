"""From tensors to be filled to requests for regions of stored tensors, and the reading of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast._base.boxes import Box, cut, place_of, volume
from holdfast._base.tuning import COMPARED_BYTES
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._formats.native.dtypes import DType
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.torch_elements import as_array, as_tensor, torch_dtype
from holdfast._formats.native.values import numpy_dtype_from
from holdfast._formats.source import ArrayDestination, DiscardingArray, Into, ReadRequest, Source, WholeReads
from holdfast._formats.tensor_bytes import plain_addresses
from holdfast._layout.descriptions import memory_of
from holdfast._layout.tensor_items import local_chunks, on_this_rank
from holdfast.errors import UnsupportedTensorError

# Tensors of a state that are to be filled.
#
# Nearly all of most states take what is stored for them byte by byte. Those are kept as columns and handled all at
# once, since there may be very many of them, and small ones. Whatever is special about a tensor makes it a ``Fill``
# of its own.


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

    def take(self, key: str, ref: TensorRef, target: torch.Tensor) -> bool:
        """Add a tensor if its memory is just what is stored: in host memory, whole, without gaps, of the same type."""
        return self.take_fitting([key], [ref], [target])[0]

    def take_fitting(
        self, keys: Sequence[str], refs: Sequence[TensorRef], targets: Sequence[torch.Tensor]
    ) -> Sequence[bool]:
        """Add those tensors of which that can be said; which ones these are."""
        types = {ref.dtype.name: _as_it_is_stored(ref.dtype) for ref in {id(ref.dtype): ref for ref in refs}.values()}
        fits = [
            address != 0 and target.dtype is types[ref.dtype.name] and target.shape == ref.shape and ref.numpy is None
            for address, target, ref in zip(plain_addresses(targets), targets, refs, strict=True)
        ]
        everything = all(fits)
        self.keys += keys if everything else compress(keys, fits)
        self.refs += refs if everything else compress(refs, fits)
        self.targets += targets if everything else compress(targets, fits)
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
        columns = DenseFills([f.key for f in kept], [f.ref for f in kept], [f.target for f in kept])
        return columns, [fills[position] for position in sorted(out)]

    @cached_property
    def reads(self) -> WholeReads:
        """Where all of them go, when there are no more to come. The tensors must stay alive until that is done."""
        count = len(self.targets)
        addresses = np.fromiter([tensor.data_ptr() for tensor in self.targets], np.int64, count)
        if not addresses.all():
            raise _lost_memory(self.keys[int(np.argmin(addresses))])
        nbytes = np.fromiter([tensor.nbytes for tensor in self.targets], np.int64, count)
        return WholeReads([ref.key for ref in self.refs], addresses, nbytes)

    @cached_property
    def elements(self) -> int:
        """How many there are in all, when there are no more to come."""
        return sum([tensor.numel() for tensor in self.targets])

    def count_change(self) -> None:
        """Let autograd know that they were changed."""
        torch.autograd.graph.increment_version([tensor for tensor in self.targets if not tensor.is_inference()])


def _as_it_is_stored(dtype: DType) -> torch.dtype | None:
    """The type of tensors that take stored elements of a type as they are."""
    found = torch_dtype(dtype)
    return None if found is None or found.is_complex else found


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


# A target whose memory can take the stored bytes as they are is read into directly. Others (on a device, of another
# dtype) convert or copy what the source assigns to them, a little at a time.


@dataclass(frozen=True)
class Region:
    """A box of a stored tensor and the local memory that it goes into."""

    fill: Fill
    box: Box
    memory: Any
    """A tensor or numpy array of the box's size."""
    made: Any = None
    """What a function of the user made for it, if that is to be written and not what is stored."""

    @cached_property
    def same_memory(self) -> tuple[Any, ...] | None:
        """What regions in the very same memory have in common; None if there are no elements."""
        return memory_of(self.memory)

    @cached_property
    def span(self) -> MemorySpan | None:
        """Where its memory is; None if there are no elements."""
        memory = self.memory
        if type(memory) in PLAIN and memory.is_cpu and memory.numel() and memory.is_contiguous():
            address = memory.data_ptr()
            return MemorySpan("cpu", address, address + memory.nbytes)
        if self.same_memory is None:
            return None
        device, address, strides, shape, itemsize = memory_layout(memory)
        ends = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
        low = address + sum(end for end in ends if end < 0)
        return MemorySpan(device, low, address + sum(end for end in ends if end > 0) + itemsize)


class MemorySpan(NamedTuple):
    """A part of the memory of a device."""

    device: str
    begin: int
    end: int
    """The address after the last byte."""


def memory_layout(memory: Any) -> tuple[str, int, Sequence[int], Sequence[int], int]:
    """The device, the address, the strides in bytes, the shape and the element size of a tensor or numpy array."""
    if isinstance(memory, np.ndarray):
        return "cpu", memory.__array_interface__["data"][0], memory.strides, memory.shape, memory.itemsize
    size = memory.element_size()
    return str(memory.device), memory.data_ptr(), [stride * size for stride in memory.stride()], memory.shape, size


def regions_of(fill: Fill) -> list[Region]:
    """What this rank holds of a target. Nothing if it is spread over other ranks."""
    target = fill.target
    if isinstance(target, np.ndarray):
        return [Region(fill, Box((0,) * target.ndim, target.shape), target)] if target.size else []
    if not on_this_rank(target):
        return []
    return [Region(fill, box, data.detach()) for box, data in local_chunks(target, key=fill.key) if volume(box.sizes)]


def read_regions(
    regions: Sequence[Region],
    source: Source,
    *,
    verify: bool,
    dense: DenseFills | None = None,
    memory: int | None = None,
    shared: bool = False,
) -> tuple[int, int]:
    """Read all regions and whole tensors, with no more than ``memory`` bytes besides.

    ``shared`` if other ranks do so too. Returns the bytes that were read from storage, and the elements that were
    written.
    """
    dense = dense or DenseFills()
    requests = [_request(region.fill.ref, region.box, place_in(region)) for region in regions]
    nbytes = 0
    if requests or dense.keys:
        nbytes = source.read_many(requests, dense.reads, verify=verify, memory=memory, shared=shared)
    written = sum(volume(request.sizes) for request in requests) + dense.elements
    dense.count_change()
    count_changes(regions)
    return nbytes, written


def count_changes(regions: Iterable[Region]) -> None:
    """Let autograd know that the tensors of these regions were changed."""
    for tensor in {id(tensor): tensor for tensor in map(_counted, regions)}.values():
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


class Converted(ArrayDestination):
    """Memory that cannot take stored bytes as they are. What is assigned to it is converted, or copied to where it is.

    >>> from holdfast._formats.native.dtypes import dtype_named
    >>> memory = torch.zeros(2, dtype=torch.float64)
    >>> Converted(memory, TensorRef("a", dtype_named("float32"), (2,)))[0:1] = np.array([1.5], "<f4").view("<u4")
    >>> memory
    tensor([1.5000, 0.0000], dtype=torch.float64)
    """

    def __init__(self, memory: Any, ref: TensorRef) -> None:
        super().__init__(memory.shape, ref.dtype.carrier)
        self._memory = memory
        self._ref = ref

    def __getitem__(self, place: Any) -> Converted:
        return Converted(self._memory[place], self._ref)

    def transpose(self, order: Sequence[int], /) -> Converted:
        is_array = isinstance(self._memory, np.ndarray)
        return Converted(self._memory.transpose(order) if is_array else self._memory.permute(order), self._ref)

    def __setitem__(self, place: Any, carriers: Any) -> None:
        carriers = np.asarray(carriers, self.dtype)
        if not carriers.flags.aligned:
            carriers = carriers.copy()
        # The mode of inference is one of the thread that began the load, and this may be another one.
        is_inference = isinstance(self._memory, torch.Tensor) and self._memory.is_inference()
        with torch.inference_mode(True) if is_inference else nullcontext():
            put(self._memory[place], elements_of(carriers, self._ref))


def _counted(region: Region) -> Any:
    """The tensor whose changes autograd counts. A ``ShardedTensor`` is none: it only has some."""
    target = region.fill.target
    return region.memory if isinstance(target, ShardedTensor) else target


def check_regions(regions: Iterable[Region], source: Source, memory: int | None = None) -> None:
    """Read all regions to nowhere, to see whether they are undamaged."""
    requests = [
        _request(region.fill.ref, region.box, DiscardingArray(region.box.sizes, region.fill.ref.dtype.carrier))
        for region in regions
    ]
    source.read(requests, verify=True, memory=memory)


def elements_in(region: Region, source: Source) -> Any:
    """What is stored for a region, in memory of its own."""
    buffer = np.empty(region.box.sizes, region.fill.ref.dtype.carrier)
    source.read([_request(region.fill.ref, region.box, buffer)])
    return elements_of(buffer, region.fill.ref)


def elements_of(buffer: np.ndarray[Any, Any], ref: TensorRef) -> Any:
    """What was read as elements of the stored type: a torch tensor, or a numpy array if it is one that torch lacks."""
    if ref.numpy is not None:
        return buffer.view(numpy_dtype_from(ref.numpy))
    dtype = torch_dtype(ref.dtype)
    return buffer if dtype is None else as_tensor(buffer, dtype)


def put(memory: Any, elements: Any) -> None:
    """Copy elements into memory, converting them if the types differ."""
    if isinstance(memory, np.ndarray):
        if isinstance(elements, torch.Tensor):
            elements = _known_to_numpy(elements.detach().cpu())
        memory[...] = elements
    else:
        if isinstance(elements, np.ndarray):
            elements = torch.from_numpy(np.asarray(elements, elements.dtype.newbyteorder("=")))
        memory.copy_(elements)


def _known_to_numpy(elements: torch.Tensor) -> Any:
    try:
        return elements.numpy()
    except TypeError:
        wide = torch.complex64 if elements.is_complex() else torch.float32
        return elements.to(wide).numpy()


def _request(ref: TensorRef, box: Box, into: Any) -> ReadRequest:
    return ReadRequest(ref.key, box.offsets, box.sizes, into)


def place_in(region: Region) -> Into:
    """Where stored elements of a region are put: its memory, or something that converts them on the way there."""
    into = _carrier_view(region)
    return Converted(region.memory, region.fill.ref) if into is None else into


def _carrier_view(region: Region) -> Any:
    """The memory of a region as an array that stored bytes can be put into; None if they need another way."""
    memory, ref = region.memory, region.fill.ref
    if isinstance(memory, np.ndarray):
        same = memory.dtype.itemsize == ref.dtype.itemsize and (
            ref.numpy is not None or (ref.dtype.numpy is not None and memory.dtype == ref.dtype.numpy)
        )
        return memory.view(ref.dtype.carrier) if same and _is_of_type(memory, ref) else None
    if type(memory) not in (torch.Tensor, torch.nn.Parameter) or memory.device.type != "cpu":
        return None
    if memory.dtype != torch_dtype(ref.dtype) or memory.is_conj() or memory.is_neg():
        return None
    return as_array(memory)


def _is_of_type(memory: np.ndarray[Any, Any], ref: TensorRef) -> bool:
    return ref.numpy is None or memory.dtype == numpy_dtype_from(ref.numpy)


def small_parts(region: Region, most: int = COMPARED_BYTES) -> Iterator[Region]:
    """A region, cut along its first dimensions."""
    for offsets, sizes in cut(region.box, max(most // region.fill.ref.dtype.itemsize, 1)):
        memory = region.memory[place_of(offsets, sizes, origin=region.box.offsets)]
        yield Region(region.fill, Box(offsets, sizes), memory)
