"""A save that is simulated is the save that real ranks make, but for the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._base.tiling import tiling_problems
from holdfast._formats.native.names import rank_of
from holdfast._ranks.exchanges import as_list, entries_of
from holdfast._ranks.trees import groups_of, strides_of
from holdfast._tools.simulating.layouts import GROUPED, LAYOUTS, bytes_of, described, shapes_of
from holdfast._tools.simulating.links import SimulatedLink, Work
from holdfast._tools.simulating.simulate import Machines, simulate

MACHINES = Machines(ranks_each=4, disk_speed=1_000, network_speed=10_000)


def simulated(ranks: int, layout: str, *, tensors: int = 10, group: int = 2, nbytes: int = 1 << 20):
    return simulate(ranks, tensors, layout, group=group, nbytes=nbytes, machines=MACHINES)


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 12), st.integers(1, 4), st.integers(1, 12))
def test_what_the_ranks_of_a_layout_hold_covers_every_tensor(layout, groups, group, tensors):
    ranks = groups * group
    shapes = shapes_of(tensors, 1 << 12)

    by_rank = [described(shapes, LAYOUTS[layout](ranks, group), rank, ranks) for rank in range(ranks)]

    for number, shape in enumerate(shapes):
        boxes = {box for descriptions in by_rank for box in descriptions[number].boxes}
        assert list(tiling_problems(sorted(boxes), shape.sizes)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 6, 70])
def test_every_byte_is_written_by_one_rank(layout, ranks):
    result = simulated(ranks, layout)

    assert result["bytes"] == bytes_of(shapes_of(10, 1 << 20))
    assert result["busiest_rank_bytes"] >= result["bytes"] / ranks
    assert result["busiest_rank_bytes"] >= max(result[who]["bytes_written"] for who in ("root", "rank"))
    assert 1 <= result["files"] <= ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_have_the_same_send_a_few_bytes_each_however_many_there_are(layout):
    results = [simulated(ranks, layout) for ranks in (4, 64, 2048)]

    for result in results:
        assert result["rank"]["message_bytes_in"] + result["rank"]["message_bytes_out"] <= 1024
        assert max(result[who]["connections"] for who in ("root", "rank")) <= 64
    small, _, large = (result["root"]["message_bytes_in"] for result in results)
    assert large <= 64 * small


def test_what_a_simulated_rank_writes_is_what_a_real_one_writes(ranks, tmp_path):
    result = simulated(4, "hsdp")
    shapes = shapes_of(10, 1 << 20)

    by_rank = ranks(4).run(save_hsdp, tmp_path / "a", [shape.sizes for shape in shapes])

    assert by_rank == [by_rank[0]] * 4
    for who in ("root", "rank"):
        assert by_rank[0][result[who]["number"]] == result[who]["bytes_written"]
    assert max(by_rank[0].values()) == result["busiest_rank_bytes"]
    assert len(by_rank[0]) == result["files"]


def save_hsdp(path, sizes):
    """Save tensors that are cut over two ranks, twice. Returns how many bytes of tensors each rank has written."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        f"{number:03}": distribute_tensor(torch.zeros(size), mesh, [Replicate(), Shard(0)])
        for number, size in enumerate(sizes)
    }
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    holdfast.save(state, path)
    dist.barrier()
    written = {}
    with holdfast.open(path) as checkpoint:
        for chunk_file, nbytes in chunks_in(checkpoint):
            rank = rank_of(chunk_file)
            written[rank] = written.get(rank, 0) + nbytes
    return written


def chunks_in(checkpoint):
    """The file and the size of every chunk."""
    for key in checkpoint:
        for place in checkpoint._source.chunk_places(key):
            yield place.file, place.nbytes


def test_groups_must_divide_the_ranks():
    for layout in GROUPED:
        with pytest.raises(ValueError, match="10 ranks do not make groups of 4"):
            simulated(10, layout, group=4)


def test_times_follow_from_the_speeds():
    slow, fast = (
        simulate(8, 10, "ddp", group=2, nbytes=1 << 20, machines=MACHINES._replace(disk_speed=speed))
        for speed in (1_000, 2_000)
    )

    assert slow["estimated_seconds"]["load"] == slow["bytes"] * 4 / 1_000
    assert slow["estimated_seconds"]["load"] == 2 * fast["estimated_seconds"]["load"]
    assert slow["estimated_seconds"]["save"] > slow["busiest_rank_bytes"] * 4 / 1_000


@pytest.mark.parametrize("size", [2, 31, 33, 1_000])
def test_a_simulated_root_hears_of_every_rank_once(size):
    work = Work()
    link = SimulatedLink(0, size, work)

    gathered = link.ask(as_list([b"word"]))

    assert gathered is not None
    assert len(list(entries_of(gathered))) == size
    assert link.connections == sum(len(group.members) - 1 for group in groups_of(0, size, strides_of(size)))
    assert work.bytes_in == (size - 1) * len(as_list([b"word"]))


def test_what_others_do_is_not_counted(monkeypatch):
    times = iter([10, 11, 14, 16])  # the block of others lasts from 11 to 14
    monkeypatch.setattr("holdfast._tools.simulating.links.time.process_time", lambda: next(times))
    work = Work()

    with work.counted(), work.of_others():
        pass

    assert work.cpu == 3
