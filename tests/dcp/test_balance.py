"""What several ranks hold is written once, and the ranks share the work by the bytes that they really write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import holdfast.dcp as dcp
from tests.dcp.states import Layouts, distributed, load, numbered, read_index, same_parts, save, sharded_tensor
from tests.rank_pool import RankPool

KIB = 1024
PER_ITEM = 2 * KIB  # what a blob has besides the bytes of its tensor, and more


def kibibytes(count: int, start: int = 0) -> torch.Tensor:
    """A tensor of that many KiB, as one column per KiB."""
    return numbered(256, count, start=start)


def written_by_rank(path: Path, world_size: int) -> list[int]:
    """The bytes of all items in the files of each rank, according to the index."""
    written = [0] * world_size
    for place in read_index(path).storage_data.values():
        written[int(place.relative_path.split("_")[2])] += place.length
    return written


def writers_of(path: Path) -> dict[str, set[int]]:
    """The ranks that wrote the chunks of each key."""
    writers: dict[str, set[int]] = {}
    for index, place in read_index(path).storage_data.items():
        writers.setdefault(index.fqn, set()).add(int(place.relative_path.split("_")[2]))
    return writers


def items_of(path: Path) -> Counter[str]:
    """How many items of each key are stored."""
    return Counter(index.fqn for index in read_index(path).storage_data)


def size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


# --- once ------------------------------------------------------------------------------------------------------------


def save_copies(path, **options):
    """Everything that more than one rank may hold."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    state = {
        "plain": kibibytes(40),
        "replicated": distributed(kibibytes(40), line, [Replicate()]),
        "replicated on a grid": distributed(kibibytes(40), grid, [Replicate(), Replicate()]),
        "hsdp": distributed(kibibytes(40), grid, [Replicate(), Shard(1)]),
        "scalar": torch.tensor(1.0),
        "value": {"nested": ["text", 1]},
    }
    dcp.save(state, checkpoint_id=path, **options)


def test_copies_are_written_once(ranks: RankPool, tmp_path):
    ranks(4).run(save_copies, tmp_path)
    once = ["plain", "replicated", "replicated on a grid", "scalar", "value.nested"]
    assert items_of(tmp_path) == {**dict.fromkeys(once, 1), "hsdp": 2}
    assert 160 * KIB < size_on_disk(tmp_path) < 160 * KIB + 7 * PER_ITEM


def test_copies_of_a_few_ranks_are_written_once_by_one_of_them(ranks: RankPool, tmp_path):
    ranks(4).run(save_keys_of_few_ranks, tmp_path)
    assert set(items_of(tmp_path).values()) == {1}
    for key, writers in writers_of(tmp_path).items():
        assert writers <= {int(rank) for rank in key.split()}


def save_keys_of_few_ranks(path):
    rank = dist.get_rank()
    keys = ["0", "3", "1 2", "0 3", "1 2 3", "0 1 2 3"]
    dcp.save({key: kibibytes(10) for key in keys if str(rank) in key}, checkpoint_id=path)


def test_all_copies_are_left_to_the_lowest_rank_if_asked_for(ranks: RankPool, tmp_path):
    ranks(4).run(save_copies, tmp_path, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    writers = writers_of(tmp_path)
    assert writers.pop("hsdp") == {0, 1}  # on a grid of 2 x 2 these two hold all of it
    assert set(map(frozenset, writers.values())) == {frozenset({0})}


# --- balanced --------------------------------------------------------------------------------------------------------


def save_plain(path, sizes):
    dcp.save({f"tensor {n}": kibibytes(size, start=n) for n, size in enumerate(sizes)}, checkpoint_id=path)


@pytest.mark.parametrize(
    ("sizes", "least_for_four_ranks"),
    [
        ([50] * 8, 100),
        ([10, 20, 30, 40, 50, 60, 70, 80], 90),
        ([80, 70, 60, 50, 40, 30, 20, 10], 90),
        ([160, *[10] * 16], 160),
        ([*[10] * 16, 160], 160),
        ([40] * 7, 80),
    ],
)
def test_copies_are_spread_so_that_nobody_writes_more_than_it_must(
    ranks: RankPool, tmp_path, sizes, least_for_four_ranks
):
    ranks(4).run(save_plain, tmp_path, sizes)
    written = written_by_rank(tmp_path, 4)
    assert max(written) <= least_for_four_ranks * KIB + len(sizes) * PER_ITEM


def save_hsdp(path):
    grid = init_device_mesh("cpu", (2, 2))
    state = {f"weight {n}": distributed(kibibytes(40, start=n), grid, [Replicate(), Shard(0)]) for n in range(6)}
    dcp.save(state, checkpoint_id=path)


def test_replicas_of_shards_share_the_work(ranks: RankPool, tmp_path):
    ranks(4).run(save_hsdp, tmp_path)
    assert set(items_of(tmp_path).values()) == {2}
    written = written_by_rank(tmp_path, 4)
    assert max(written) <= 60 * KIB + 3 * PER_ITEM
    assert min(written) >= 60 * KIB


def save_beside_a_large_shard(path):
    """Rank 1 alone holds 200 KiB; 200 KiB more are on both ranks."""
    own = [((0, 0), (256, 200))] if dist.get_rank() == 1 else []
    state = {f"copy {n}": kibibytes(50, start=n) for n in range(4)}
    dcp.save({**state, "own": sharded_tensor(kibibytes(200), own)}, checkpoint_id=path)


def test_a_rank_that_has_much_of_its_own_is_given_no_copies(ranks: RankPool, tmp_path):
    ranks(2).run(save_beside_a_large_shard, tmp_path)
    writers = writers_of(tmp_path)
    assert writers.pop("own") == {1}
    assert set(map(frozenset, writers.values())) == {frozenset({0})}


def save_beside_shards_of_a_large_tensor(path):
    """A tensor of 400 KiB of which ranks 0 to 2 hold 4 KiB each, and rank 3 the rest; four copies of 60 KiB."""
    rank = dist.get_rank()
    box = ((0, 4 * rank), (256, 4)) if rank < 3 else ((0, 12), (256, 388))
    state = {f"copy {n}": kibibytes(60, start=n) for n in range(4)}
    dcp.save({"large": sharded_tensor(kibibytes(400), [box]), **state}, checkpoint_id=path)


def test_a_small_shard_of_a_large_tensor_counts_as_small(ranks: RankPool, tmp_path):
    """Stock counts the whole tensor for each of its shards, and so would give rank 3 a copy too."""
    ranks(4).run(save_beside_shards_of_a_large_tensor, tmp_path)
    writers = writers_of(tmp_path)
    copies = [writers[f"copy {n}"] for n in range(4)]
    assert not any(3 in who for who in copies)
    assert sorted(Counter(rank for who in copies for rank in who).values()) == [1, 1, 2]


def save_large_values(path):
    """Three values of 100 KiB and one tensor of the same size."""
    values = {f"value {n}": bytes([n]) * (100 * KIB) for n in range(3)}
    dcp.save({**values, "tensor": kibibytes(100)}, checkpoint_id=path)


def test_values_count_with_their_size(ranks: RankPool, tmp_path):
    """Stock counts them as one byte each, and so gives all three to the rank that has not got the tensor."""
    ranks(2).run(save_large_values, tmp_path)
    written = written_by_rank(tmp_path, 2)
    assert max(written) < 200 * KIB + 2 * PER_ITEM


def save_many_small(path):
    state = {f"tensor {n}": torch.tensor(n) for n in range(40)} | {f"value {n}": n for n in range(40)}
    dcp.save(state, checkpoint_id=path)


def test_many_small_things_are_spread_too(ranks: RankPool, tmp_path):
    ranks(4).run(save_many_small, tmp_path)
    writers = writers_of(tmp_path)
    for kind in ("tensor", "value"):
        counts = Counter(rank for n in range(40) for rank in writers[f"{kind} {n}"])
        assert sum(counts.values()) == 40
        assert min(counts[rank] for rank in range(4)) >= 8


def save_with_threads(path):
    """Rank 1 writes two files: of its 4 KiB of a large tensor, and of four tensors of 50 KiB."""
    rank = dist.get_rank()
    large = sharded_tensor(kibibytes(400), [((0, 4), (256, 396)) if rank == 0 else ((0, 0), (256, 4))])
    others = {f"tensor {n}": kibibytes(50, start=n) for n in range(4)} if rank == 1 else {}
    dcp.save({"large": large, **others}, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def test_the_threads_of_a_rank_share_its_work_by_bytes_too(ranks: RankPool, tmp_path):
    """Stock gives the small shard of the large tensor a file of its own, and all the rest to the other thread."""
    ranks(2).run(save_with_threads, tmp_path)
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("__1_*.distcp"))
    assert len(sizes) == 2
    assert sizes[0] > 100 * KIB


# --- and still right -------------------------------------------------------------------------------------------------


def save_and_load_spread(path):
    layouts = Layouts()
    full = {f"{name} {n}": (name, kibibytes(3, start=n)) for name in ("plain", "hsdp", "replicated") for n in range(5)}
    save("ours", {key: layouts.lay_out(name, tensor) for key, (name, tensor) in full.items()}, path)
    lost = []
    for loader in ("ours", "stock"):
        target = {key: layouts.lay_out(name, torch.zeros_like(tensor)) for key, (name, tensor) in full.items()}
        load(loader, target, path)
        lost += [k for k, (name, tensor) in full.items() if not same_parts(target[k], layouts.lay_out(name, tensor))]
    return lost


def test_what_was_spread_over_ranks_comes_together_again(ranks: RankPool, tmp_path):
    assert ranks(4).run(save_and_load_spread, tmp_path) == [[]] * 4
    assert all(written_by_rank(tmp_path, 4))
