"""From tensors to be filled to requests for regions of stored tensors, and the reading of them.

A target whose memory can take the stored bytes as they are is read into directly. Others (on a device, of another
dtype) convert or copy what the source assigns to them, a little at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.boxes import Box, cut, overlaps, place_of, uncovered, volume
from holdfast.compat.sharded_tensors import ShardedTensor
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.torch_elements import as_array, as_tensor, torch_dtype
from holdfast.formats.native.values import numpy_dtype_from
from holdfast.metadata import MetadataIndex
from holdfast.planning.tensors import create_chunk_list, find_tensor_shard, on_this_rank
from holdfast.sources.source import Into, LikeAnArray, Nowhere, Request, Source
from holdfast.tuning import COMPARED_BYTES
from holdfast.verbs.fills import DenseFills, Fill


@dataclass(frozen=True)
class Region:
    """A box of a stored tensor and the local memory that it goes into."""

    fill: Fill
    box: Box
    memory: Any
    """A tensor or numpy array of the box's size."""


def regions_of(fill: Fill) -> list[Region]:
    """What this rank holds of a target. Nothing if it is spread over other ranks."""
    target = fill.target
    if isinstance(target, np.ndarray):
        return [Region(fill, Box((0,) * target.ndim, target.shape), target)] if target.size else []
    if not on_this_rank(target):
        return []
    found = []
    for chunk in create_chunk_list(target, key=fill.key):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if volume(box.sizes):
            found.append(Region(fill, box, find_tensor_shard(target, MetadataIndex(fill.key, chunk.offsets)).detach()))
    return found


def hole_in(region: Region, source: Source) -> str | None:
    """A part of a region that no stored chunk covers, in words."""
    chunks = source.chunks(region.fill.ref.key)
    if len(chunks) == 1 and chunks[0].sizes == region.fill.ref.shape:
        return None
    touching = [chunks[shared.source] for shared in overlaps([region.box], chunks)]
    hole = uncovered(region.box, touching)
    return None if hole is None else f"no stored chunk covers offsets {list(hole.offsets)}, sizes {list(hole.sizes)}"


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
    requests = [_request(region.fill.ref, region.box, _place_in(region)) for region in regions]
    nbytes = 0
    if requests or dense.keys:
        nbytes = source.read_many(requests, dense.reads, verify=verify, memory=memory, shared=shared)
    written = sum(volume(request.sizes) for request in requests) + dense.elements
    dense.count_change()
    for tensor in {id(tensor): tensor for tensor in map(_counted, regions)}.values():
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return nbytes, written


class Converted(LikeAnArray):
    """Memory that cannot take stored bytes as they are. What is assigned to it is converted, or copied to where it is.

    >>> from holdfast.formats.native.dtypes import dtype_named
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
        _request(region.fill.ref, region.box, Nowhere(region.box.sizes, region.fill.ref.dtype.carrier))
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


def _request(ref: TensorRef, box: Box, into: Any) -> Request:
    return Request(ref.key, box.offsets, box.sizes, into)


def _place_in(region: Region) -> Into:
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
