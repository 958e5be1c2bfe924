"""Loads by more ranks than are in one group of the tree: each stored byte is read once by the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast._load import read_division
from holdfast._load.cooperative_reading import CooperativeReading
from holdfast._ranks import private_group
from tests.many_ranks import run_forked
from tests.sharding import dtensor_of

pytestmark = pytest.mark.ranks


def content() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"large.{n}": torch.randn(2000 + n, 512, generator=generator) for n in range(6)}
    found |= {f"small.{n}": torch.randn(70 + n, 3, generator=generator).bfloat16() for n in range(30)}
    return found | {"scalar": torch.tensor(3.5)}


UNIQUE = sum(tensor.nbytes for tensor in content().values())


def laid_out(layout: str, *, blank: bool = False) -> dict[str, Any]:
    whole = {key: torch.zeros_like(value) if blank else value for key, value in content().items()}
    size = dist.get_world_size()
    if layout == "ddp":
        return whole
    mesh = init_device_mesh("cpu", (4, size // 4) if layout == "hsdp" else (size,))
    placements = [Replicate(), Shard(0)] if layout == "hsdp" else [Shard(0)]
    return {
        key: dtensor_of(value, mesh, placements if value.ndim else [Replicate()] * mesh.ndim)
        for key, value in whole.items()
    }


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def load_in_a_tree(path: Path, largest: int) -> tuple[dict[str, int], int]:
    """What all ranks read together in each layout, and the connections of this one."""
    private_group.LARGEST_GROUP = largest
    found = {}
    for layout, budget in (("ddp", None), ("hsdp", None), ("fsdp", None), ("ddp with little memory", 512 << 10)):
        directly, state, expected = (laid_out(layout[:4].strip(), blank=blank) for blank in (True, True, False))
        holdfast.load(directly, path, share_reads="off")
        found[layout] = holdfast.load(state, path, share_reads="job", memory_budget=budget).bytes_read
        for key, value in state.items():
            assert torch.equal(local(value), local(expected[key])), (layout, key)
            assert torch.equal(local(value), local(directly[key])), (layout, key)
    link = private_group.private_group_of(None, "calls")
    return found, sum(len(tree.members) - 1 for tree, _ in link._groups or ())


@pytest.mark.parametrize("largest", [4, pytest.param(32, marks=pytest.mark.long)])
def test_forty_ranks_in_a_tree_of_groups_read_every_byte_once(tmp_path, largest):
    holdfast.save(content(), tmp_path / "c")
    found = run_forked(40, load_in_a_tree, tmp_path / "c", largest, deadline=300)
    read = found[0][0]
    assert read.pop("ddp with little memory")  # where digest blocks are read again for smaller parts
    assert all(UNIQUE <= nbytes <= 1.05 * UNIQUE for nbytes in read.values()), read
    assert max(connections for _, connections in found) <= 2 * largest


def load_with_too_many_wants(path: Path) -> tuple[int, bool]:
    private_group.LARGEST_GROUP = 3
    read_division.MOST_WANTED_BYTES = 1000
    state, expected = laid_out("ddp", blank=True), laid_out("ddp")
    report = holdfast.load(state, path, share_reads="job")
    return report.bytes_read, all(torch.equal(state[key], expected[key]) for key in expected)


def test_where_lists_of_wants_are_too_long_each_group_reads_every_byte_once(tmp_path):
    holdfast.save(content(), tmp_path / "c")
    found = run_forked(8, load_with_too_many_wants, tmp_path / "c")
    assert all(is_right for _, is_right in found)
    assert 3 * UNIQUE <= found[0][0] <= 3.1 * UNIQUE


def load_with_one_that_cannot_pass_it_on(path: Path) -> tuple[str, bool]:
    private_group.LARGEST_GROUP = 3
    before = CooperativeReading._messages

    def fails(self: Any, *args: Any) -> Any:
        raise MemoryError("no memory for a message")

    if dist.get_rank() == 3:  # the leader of a group, in which nobody reads
        CooperativeReading._messages = fails
    state, expected = laid_out("ddp", blank=True), laid_out("ddp")
    try:
        holdfast.load(state, path, share_reads="job")
    except MemoryError as error:
        notes = "".join(getattr(error, "__notes__", []))
    CooperativeReading._messages = before
    holdfast.load(state, path, share_reads="job")
    return notes, all(torch.equal(state[key], expected[key]) for key in expected)


def test_a_leader_that_fails_to_pass_it_on_sends_something_else_and_then_all_fail(tmp_path):
    holdfast.save(content(), tmp_path / "c")
    for notes, is_right in run_forked(8, load_with_one_that_cannot_pass_it_on, tmp_path / "c"):
        assert "on rank 3" in notes
        assert is_right
