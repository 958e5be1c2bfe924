"""Regions of tensors to ask a source for, and memory of every shape and order to have them put into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from holdfast._formats.source import ReadRequest, Source
from tests.dcp.states import bits, of_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SHAPES = [(), (1,), (7,), (0,), (5, 3), (4, 0, 2), (3, 4, 5), (2, 1, 3, 2)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits: NaNs of all kinds must come back as they were."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    return of_bytes(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator), dtype, shape)


def every_kind(dtypes: list[torch.dtype] = DTYPES) -> dict[str, torch.Tensor]:
    """A tensor of every dtype in every shape."""
    tensors = {}
    for dtype in dtypes:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape)) or 'scalar'}"
            tensors[name] = random_tensor(dtype, shape, seed=len(tensors))
    return tensors


@st.composite
def memory(draw: st.DrawFn, sizes: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A writable array of these sizes whose dimensions lie in any order, with gaps, and forwards or backwards."""
    order = draw(st.permutations(range(len(sizes))))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -3])) for _ in sizes]
    before = [draw(st.integers(0, 2)) for _ in sizes]
    full = [before[dim] + max(sizes[dim] * abs(steps[dim]), 1) for dim in range(len(sizes))]
    block = np.zeros([full[dim] for dim in order], dtype).transpose(np.argsort(order)) if sizes else np.zeros((), dtype)
    for dim, (size, step, start) in enumerate(zip(sizes, steps, before, strict=True)):
        kept = [slice(None)] * len(sizes)
        kept[dim] = slice(start, start + size * abs(step), abs(step))
        block = block[tuple(kept)]
        if step < 0:
            block = np.flip(block, dim)
    assert block.shape == sizes
    return block


@st.composite
def requests_for(draw: st.DrawFn, source: Source) -> list[ReadRequest]:
    """Some regions of some of the source's tensors."""
    found = []
    for key in draw(st.lists(st.sampled_from(sorted(source.tensors)), min_size=1, max_size=4)):
        ref = source.tensors[key]
        edges = [sorted(draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in ref.shape]
        offsets, sizes = tuple(low for low, _ in edges), tuple(high - low for low, high in edges)
        found.append(ReadRequest(key, offsets, sizes, draw(memory(sizes, ref.dtype.carrier))))
    return found


def wrong(requests: list[ReadRequest], originals: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """The requests that were not filled with what slicing the original gives."""
    return [
        (request.key, request.offsets, request.sizes)
        for request in requests
        if request.into.tobytes() != region_of(originals[request.key], request)
    ]


def region_of(original: torch.Tensor, request: ReadRequest) -> bytes:
    """The elements that a request asks for, cut out of all of them."""
    elements = np.frombuffer(bits(original), request.into.dtype).reshape(original.shape)
    sides = zip(request.offsets, request.sizes, strict=True)
    return elements[tuple(slice(at, at + size) for at, size in sides)].tobytes()


def whole(source: Source, key: str, *, verify: bool = True) -> bytes:
    """All elements of a tensor as the source gives them."""
    ref = source.tensors[key]
    into = np.zeros(ref.shape, ref.dtype.carrier)
    source.read([ReadRequest(key, (0,) * len(ref.shape), ref.shape, into)], verify=verify)
    return into.tobytes()


def differing_from(source: Source, originals: Mapping[str, torch.Tensor]) -> list[str]:
    """The keys whose tensors are not what was saved, bit by bit."""
    assert set(source.tensors) == set(originals)
    return [
        key
        for key, tensor in originals.items()
        if source.tensors[key].dtype != tensor.dtype
        or source.tensors[key].shape != tuple(tensor.shape)
        or whole(source, key) != bits(tensor)
    ]
