"""Tensors of a state that are in the same memory: tied ones, which are read once, and views of one another.

What is stored for the elements that they share has to be the same, or one of them would not be as it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from holdfast._formats.source import Source
from holdfast._layout.descriptions import memory_of
from holdfast._load.filling import MemorySpan, Region, elements_in, memory_layout, put, small_parts
from holdfast._load.findings import LoadFindings


def settle_missing_names(found: LoadFindings) -> None:
    """Tied tensors are loaded if one of their names is stored: take the others off the list of what is missing."""
    if not found.missing:
        return
    fills = [*found.fills, *found.dense.fills()]
    loaded = {memory: fill.key for fill in fills if (memory := memory_of(fill.target)) is not None}
    for key, target in list(found.missing.items()):
        name = None if target is None else loaded.get(memory_of(target) or ())
        if name is not None:
            found.settle(key)
            found.notes.append(f"'{key}' is not stored; it is the same tensor as '{name}' and was loaded with it")


def share_memory(regions: Sequence[Region]) -> bool:
    """Whether two regions may have elements in common: their memory, or what is between their elements, overlaps."""
    reach: dict[str, int] = {}
    for device, begin, end in sorted(span for region in regions if (span := region.span) is not None):
        if begin < reach.get(device, begin):
            return True
        reach[device] = end
    return False


def once_each(regions: Sequence[Region]) -> list[Region]:
    """One region for all names of the same memory: the first one."""
    return _first_of_each(regions, lambda region: region.same_memory)


def conflicts(regions: Sequence[Region], source: Source) -> dict[str, str]:
    """Keys whose memory would be filled with one thing and then, in part, with another."""
    found: dict[str, str] = {}
    for one, other in _sharing(_first_of_each(regions, _memory_and_content)):
        if not _agree(one, other, source):
            first, second = one.fill.key, other.fill.key
            how = "is tied to" if _is_same_memory(one, other) else "shares memory with"
            found[second] = f"{how} '{first}' in the state, and the checkpoint has different elements for the two"
    return found


def _first_of_each(regions: Sequence[Region], kind: Callable[[Region], Any]) -> list[Region]:
    seen = set()
    kept = []
    for region in regions:
        found = kind(region)
        if found is None or found not in seen:
            kept.append(region)
        seen.add(found)
    return kept


def _memory_and_content(region: Region) -> Any:
    memory = region.same_memory
    return None if memory is None or region.made is not None else (memory, region.fill.ref.key, region.box)


def _sharing(regions: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Pairs that have elements in common."""
    spans = [(region.span, region) for region in regions if region.span is not None]
    open_: list[tuple[MemorySpan, Region]] = []
    for span, region in sorted(spans, key=lambda found: found[0][:2]):
        open_ = [other for other in open_ if other[0].device == span.device and other[0].end > span.begin]
        for _, other in open_:
            if _have_common_elements(other, region):
                yield other, region
        open_.append((span, region))


def _agree(one: Region, other: Region, source: Source) -> bool:
    if _is_same_memory(one, other) and one.made is None and other.made is None:
        refs = one.fill.ref, other.fill.ref
        if refs[0].dtype != refs[1].dtype:
            return False
        pairs = zip(small_parts(one), small_parts(other), strict=True)
        return all(_same_bits(elements_in(first, source), elements_in(second, source)) for first, second in pairs)
    return _agree_when_written(one, other, source)


def _agree_when_written(one: Region, other: Region, source: Source) -> bool:
    """Region both to spare memory that is laid out in the same way, and see whether the first one is still there."""
    spans = [span for span in (one.span, other.span) if span is not None]
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    scratch = torch.empty(end - start + 16, dtype=torch.uint8, device="cpu")
    views = []
    for region, span in zip((one, other), spans, strict=True):
        memory = region.memory
        if isinstance(memory, np.ndarray) or (span.begin - start) % memory.element_size():
            return False
        empty = torch.empty(0, dtype=memory.dtype, device="cpu")
        place = (span.begin - start) // memory.element_size()
        views.append(empty.set_(scratch.untyped_storage(), place, memory.shape, memory.stride()))
    put(views[0], _elements(one, source))
    before = views[0].clone()
    put(views[1], _elements(other, source))
    return _same_bits(before, views[0].clone())


def _elements(region: Region, source: Source) -> Any:
    """What will be written."""
    return elements_in(region, source) if region.made is None else region.made


def _same_bits(one: Any, other: Any) -> bool:
    arrays = [
        part if isinstance(part, np.ndarray) else part.contiguous().reshape(-1).view(torch.uint8).numpy()
        for part in (one, other)
    ]
    return arrays[0].tobytes() == arrays[1].tobytes()


def _is_same_memory(one: Region, other: Region) -> bool:
    return one.same_memory == other.same_memory


def host_memory(region: Region) -> tuple[int, int] | None:
    """The addresses of the first byte and of that after the last one, if they are in host memory."""
    span = region.span
    return None if span is None or span.device != "cpu" else span[1:]


def _have_common_elements(one: Region, other: Region) -> bool:
    first, second = (_Addresses(region.memory).array() for region in (one, other))
    try:
        return np.shares_memory(first, second, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Memory of any device as far as numpy's arithmetic on addresses needs it. Nothing is ever read through it."""

    def __init__(self, memory: Any) -> None:
        _, address, strides, shape, itemsize = memory_layout(memory)
        self.__array_interface__: Mapping[str, Any] = {
            "version": 3,
            "data": (address, False),
            "strides": tuple(strides),
            "shape": tuple(shape),
            "typestr": f"|V{itemsize}",
        }

    def array(self) -> Any:
        """An array at these addresses."""
        return np.asarray(self)
