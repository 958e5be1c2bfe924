"""Tensors spread over ranks in any way: saved by N, loaded by M in other ways, and found whole by a single process."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast._compat.dtensors import splits_parts_of_their_own_sizes
from holdfast._layout.placements import local_pieces
from tests.dcp.states import blank, of_bytes, same_bits, same_parts, sharded_tensor
from tests.rank_pool import RankPool

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint4]


class Layout(NamedTuple):
    """How a tensor lies on ranks: as a DTensor of a mesh, or cut at these rows into shards of a ShardedTensor."""

    mesh: list[int] | None
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    rows: tuple[int, ...] = ()


def random_layout(choose: random.Random, world_size: int, full: torch.Tensor) -> Layout:
    ndim = full.dim()
    if ndim and full.numel() and full.dtype != torch.uint4 and choose.random() < 0.2:
        return Layout(None, rows=tuple(sorted(choose.randrange(12) for _ in range(2 * world_size - 1))))
    # Torch forgets the shape of a single element on ranks that are not in its mesh.
    size = choose.choice([world_size, choose.randint(1, world_size)]) if ndim else world_size
    members = choose.sample(range(world_size), size)
    shapes = [
        shape
        for dims in (1, 2, 3)
        for shape in itertools.product(range(1, 5), repeat=dims)
        if math.prod(shape) == len(members)
    ]
    mesh_shape = choose.choice(shapes)
    return Layout(members, mesh_shape, tuple(_placement(choose, ndim) for _ in mesh_shape))


def _placement(choose: random.Random, ndim: int) -> Placement:
    if ndim == 0 or choose.random() < 0.25:
        return Replicate()
    dim = choose.randrange(ndim)
    if choose.random() < 0.7:
        return Shard(dim)
    factor = choose.randint(1, 3)
    # Uneven sizes in several parts are refused with torches that have no rule for them.
    return _StridedShard(dim, split_factor=factor if splits_parts_of_their_own_sizes() else 1)


def random_tensors(seed: int, count: int) -> dict[str, torch.Tensor]:
    """Full tensors, the same on all ranks."""
    choose = random.Random(seed)
    made = {}
    for number in range(count):
        dtype = choose.choice(DTYPES)
        shape = [choose.choice([0, 1, 2, 3, 5, 7, 8]) for _ in range(choose.choice([0, 1, 2, 2, 3]))]
        content = torch.tensor(
            [choose.randrange(256) for _ in range(math.prod(shape) * dtype.itemsize)], dtype=torch.uint8
        )
        made[f"t{number}"] = of_bytes(content, dtype, shape)
    return made


def lay_out(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have."""
    rank = dist.get_rank()
    if layout.mesh is None:
        height = full.shape[0]
        cuts = [0, *(min(row, height) for row in layout.rows), height]
        boxes = [
            ((cuts[n], *[0] * (full.dim() - 1)), (cuts[n + 1] - cuts[n], *full.shape[1:]))
            for n in range(len(cuts) - 1)
            if n % dist.get_world_size() == rank and cuts[n] < cuts[n + 1]
        ]
        return sharded_tensor(full, boxes)
    mesh = DeviceMesh("cpu", torch.tensor(layout.mesh).reshape(layout.mesh_shape), _init_backend=False)
    coordinate = mesh.get_coordinate()
    local = torch.empty(0, dtype=full.dtype)
    if coordinate is not None:
        local = _local_part(full, layout, coordinate)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, layout.placements, run_check=False, shape=full.shape, stride=stride)


def _local_part(full: torch.Tensor, layout: Layout, coordinate: Any) -> torch.Tensor:
    pieces = local_pieces(full.shape, layout.mesh_shape, coordinate, layout.placements)
    ends = [
        max((piece.local_offsets[dim] + piece.sizes[dim] for piece in pieces), default=0) for dim in range(full.dim())
    ]
    local = blank(torch.empty(ends, dtype=full.dtype))
    view, source = (local.view(torch.uint8), full.view(torch.uint8)) if full.dtype.itemsize == 1 else (local, full)
    for piece in pieces:
        here = tuple(slice(start, start + size) for start, size in zip(piece.local_offsets, piece.sizes, strict=True))
        there = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
        view[here] = source[there]
    return local


COUNT = 40


def state_on_ranks(seed: int, layout_seed: int, *, empty: bool = False) -> dict[str, torch.Tensor]:
    choose = random.Random(layout_seed)
    tensors = random_tensors(seed, COUNT)
    layouts = {key: random_layout(choose, dist.get_world_size(), full) for key, full in tensors.items()}
    return {key: lay_out(blank(full) if empty else full, layouts[key]) for key, full in tensors.items()}


def save_layouts(path: str, seed: int, layout_seed: int) -> tuple[int, int]:
    saved = holdfast.save({"tensors": state_on_ranks(seed, layout_seed)}, path)
    return saved.tensor_count, saved.bytes_written


def load_layouts(path: str, seed: int, layout_seed: int) -> list[str]:
    state = state_on_ranks(seed, layout_seed, empty=True)
    holdfast.load({"tensors": state}, path)
    expected = state_on_ranks(seed, layout_seed)
    return [key for key in state if not same_parts(state[key], expected[key])]


@pytest.mark.parametrize("saving", [1, 2, 3, 4])
def test_random_layouts_on_n_ranks_load_into_others_on_m(ranks: RankPool, tmp_path, saving):
    path = str(tmp_path / "x")
    seed = 10 * saving
    (tensors, nbytes), *_ = ranks(saving).run(save_layouts, path, seed, seed + 1)
    full = random_tensors(seed, COUNT)
    assert tensors == COUNT
    content = sum(tensor.numel() * tensor.dtype.itemsize for tensor in full.values())
    assert content <= nbytes <= content + 40_000 * saving  # headers; nothing is stored twice
    found = holdfast.open(path).read()["tensors"]
    assert [key for key in full if not same_bits(found[key], full[key])] == []
    for loading in (1, 2, 3, 4):
        lost = ranks(loading).run(load_layouts, path, seed, seed + 2 + loading)
        assert lost == [[]] * loading


def save_strided_by_torch(path: str) -> torch.Tensor:
    """Fully sharded on top of tensor parallel: the layout is made by torch, and so is what is expected."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    state = {f"model.{key}": tensor.full_tensor() for key, tensor in model.state_dict().items()}
    for number, (name, _) in enumerate(model.named_parameters()):
        entry = optimizer.state_dict()["state"][number]
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.state.{name}.{key}"] = entry[key].full_tensor()
    return state


def test_strided_shards_as_torch_makes_them(ranks: RankPool, tmp_path):
    expected, *_ = ranks(4).run(save_strided_by_torch, str(tmp_path / "x"))
    checkpoint = holdfast.open(tmp_path / "x")
    for key, tensor in expected.items():
        assert torch.equal(checkpoint[key].torch(), tensor), key
    assert len(expected) == 4 + 8


def save_hsdp_in_halves(path: str) -> dict[str, Any]:
    """Replicas of shards: each is written once, and the ranks share the work."""
    from torch.distributed.device_mesh import init_device_mesh

    from tests.dcp.states import distributed

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(40_000.0).reshape(200, 200)
    holdfast.save({f"w{n}": distributed(full + n, mesh, [Replicate(), Shard(0)]) for n in range(4)}, path)
    return {}


def test_ranks_share_the_writing_of_what_several_hold(ranks: RankPool, tmp_path):
    ranks(4).run(save_hsdp_in_halves, str(tmp_path / "x"))
    sizes = [file.stat().st_size for file in (tmp_path / "x").glob("data-*")]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)
    full = torch.arange(40_000.0).reshape(200, 200)
    found = holdfast.open(tmp_path / "x").read()
    assert all(torch.equal(found[f"w{n}"], full + n) for n in range(4))


def save_a_part(path: str, members: list[int]) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    from tests.dcp.states import distributed

    group = dist.new_group(members)
    weight = distributed(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    if dist.get_rank() not in members:
        return ""
    with pytest.raises(holdfast.errors.InvalidPlanError) as caught:
        holdfast.save({"weight": weight}, path, process_group=group)
    assert caught.value.problems
    return str(caught.value)


def test_a_sharded_tensor_is_not_saved_by_a_part_of_its_ranks(ranks: RankPool, tmp_path):
    told = ranks(2).run(save_a_part, str(tmp_path / "x"), [1])[1]
    assert "do not tile" in told
    assert "'weight': 4 of its 8 elements" in told
    assert "all ranks" in told
    assert not (tmp_path / "x").exists()
