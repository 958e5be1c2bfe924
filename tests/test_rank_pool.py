"""The harness itself: what a test may rely on when it runs a body on ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import MAX_WORLD_SIZE, RankPool, RanksFailed


def world():
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def gather_ranks():
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return gathered


def pid():
    return os.getpid()


def has_group():
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_has_a_group_of_exactly_its_world_size(ranks: RankPool, world_size):
    assert ranks(world_size).run(world) == [(rank, world_size, 1) for rank in range(world_size)]
    assert ranks(world_size).run(gather_ranks) == [list(range(world_size))] * world_size


def test_worlds_beyond_the_pool_are_refused(ranks: RankPool):
    with pytest.raises(ValueError, match=f"within 1..{MAX_WORLD_SIZE}"):
        ranks(MAX_WORLD_SIZE + 1)


def test_a_run_can_do_without_a_group(ranks: RankPool):
    assert ranks(2).run(has_group, process_group=False) == [False, False]
    assert ranks(2).run(has_group) == [True, True]
    assert ranks(2).run(has_group, process_group=False) == [False, False]


def test_workers_live_on_from_run_to_run(ranks: RankPool):
    pids = ranks(4).run(pid)
    assert len(set(pids)) == 4
    assert ranks(2).run(pid) == pids[:2]


def scaled(tensor, *, by):
    return tensor * (by + dist.get_rank())


def test_arguments_and_results_may_be_tensors(ranks: RankPool):
    first, second = ranks(2).run(scaled, torch.ones(3), by=2)
    assert torch.equal(first, torch.full((3,), 2.0))
    assert torch.equal(second, torch.full((3,), 3.0))


def sum_over_pairs():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value, group=pairs[dist.get_rank() // 2])
    return value.item()


def test_subgroups_work(ranks: RankPool):
    assert ranks(4).run(sum_over_pairs) == [11, 11, 1100, 1100]


def shard_sum(mesh_shape, decoys):
    """The sum of a sharded range, on a mesh whose groups have other names than in a run with other decoys."""
    for _ in range(decoys):
        dist.new_group([0])
    mesh = dist.init_device_mesh("cpu", mesh_shape)
    placements = [dist.tensor.Shard(0)] * len(mesh_shape)
    sharded = dist.tensor.distribute_tensor(torch.arange(8.0), mesh, placements)
    return sharded.sum().full_tensor().item()


def test_meshes_of_an_earlier_run_do_not_leak_into_a_later_one(ranks: RankPool):
    for decoys in (3, 0, 5):
        assert ranks(4).run(shard_sum, (2, 2), decoys) == [28.0] * 4


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not feel well")
    return dist.get_rank()


def test_an_exception_on_one_rank_is_raised_with_its_traceback(ranks: RankPool):
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed\n--- rank 1: ValueError: rank 1 does not") as caught:
        ranks(3).run(fail_on, 1)
    assert "in fail_on" in str(caught.value)


def test_raw_outcomes_hold_values_and_exceptions(ranks: RankPool):
    healthy, failed = ranks(2).run_raw(fail_on, 1)
    assert (healthy.value, healthy.error) == (0, None)
    assert failed.error.type_name == "ValueError"
    assert failed.error.message == "rank 1 does not feel well"
    assert isinstance(failed.error.exception, ValueError)


def assert_rank_is(rank):
    assert dist.get_rank() == rank


def test_a_failed_assertion_in_a_body_shows_the_values(ranks: RankPool):
    (outcome,) = ranks(1).run_raw(assert_rank_is, 5)
    assert outcome.error.message.startswith("assert 0 == 5")


class Unpicklable(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


def raise_unpicklable():
    raise Unpicklable(7, "takes two arguments, pickle gives one")


def return_unpicklable():
    return lambda: None


def raise_interrupt():
    raise KeyboardInterrupt


def leave():
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("body", "type_name"),
    [
        (raise_unpicklable, "Unpicklable"),
        (raise_interrupt, "KeyboardInterrupt"),
        (leave, "SystemExit"),
    ],
)
def test_workers_survive_whatever_a_body_raises(ranks: RankPool, body, type_name):
    before = ranks(2).run(pid)
    assert [outcome.error.type_name for outcome in ranks(2).run_raw(body)] == [type_name] * 2
    assert ranks(2).run(pid) == before


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure(ranks: RankPool):
    with pytest.raises(RanksFailed, match="return_unpicklable"):
        ranks(1).run(return_unpicklable)


def fail_while_others_wait():
    if dist.get_rank() == 0:
        raise ValueError("gone")
    dist.barrier()


def test_a_rank_that_raises_does_not_keep_the_others_waiting(ranks: RankPool):
    start = time.monotonic()
    outcomes = ranks(3).run_raw(fail_while_others_wait)
    assert [outcome.error.type_name for outcome in outcomes] == ["ValueError", "RuntimeError", "RuntimeError"]
    assert time.monotonic() - start < 10


def return_while_others_work():
    if dist.get_rank() == 0:
        return
    time.sleep(0.2)
    dist.barrier(group=dist.new_group([1, 2], use_local_synchronization=True))


def test_a_rank_that_returns_keeps_its_group_for_the_others(ranks: RankPool):
    ranks(3).run(return_while_others_work)


def kill_rank(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_and_replaced(ranks: RankPool):
    before = ranks(3).run(pid)
    outcomes = ranks(3).run_raw(kill_rank, 1)
    assert (outcomes[1].error.type_name, outcomes[1].error.message) == ("RankDied", "killed by SIGKILL")
    assert [outcome.error.type_name for outcome in outcomes if outcome.rank != 1] == ["RuntimeError"] * 2
    assert not set(before) & set(ranks(3).run(pid))
    assert ranks(3).run(gather_ranks) == [[0, 1, 2]] * 3


def exit_at_once(status):
    os._exit(status)


def test_a_rank_that_exits_is_named(ranks: RankPool):
    with pytest.raises(RanksFailed, match="--- rank 0: RankDied: exited with status 5"):
        ranks(1).run(exit_at_once, 5)


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def test_a_hanging_rank_hits_the_deadline_and_shows_where_it_stood(ranks: RankPool):
    finished, hanging = ranks(2).run_raw(hang_on, 1, deadline=1)
    assert finished.error is None
    assert (hanging.error.type_name, hanging.error.message) == ("DeadlineExceeded", "still running after 1 s")
    assert "in hang_on" in hanging.error.traceback
    assert ranks(2).run(gather_ranks) == [[0, 1]] * 2


def die_between_runs():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def test_a_rank_that_dies_between_runs_fails_the_next_one_and_is_replaced(ranks: RankPool):
    ranks(2).run(die_between_runs)
    time.sleep(0.5)
    assert [outcome.error.message for outcome in ranks(2).run_raw(pid)] == ["killed by SIGALRM"] * 2
    ranks(2).run(pid)


def alive(pids):
    """Those still running; a zombie that nobody has collected is not."""
    stats = [(pid, Path(f"/proc/{pid}/stat")) for pid in pids]
    return [pid for pid, stat in stats if stat.exists() and ") Z " not in stat.read_text()]


def start_child():
    return subprocess.Popen(["sleep", "600"]).pid


def test_closing_a_pool_ends_its_workers_and_their_children():
    pool = RankPool()
    pids = pool(2).run(pid) + pool(2).run(start_child)
    assert alive(pids) == pids
    pool.close()
    time.sleep(0.2)
    assert alive(pids) == []


@pytest.mark.long
def test_the_pool_withstands_a_long_series_of_failures(ranks: RankPool):
    random = Random(0)
    for _ in range(100):
        world_size = random.randint(1, MAX_WORLD_SIZE)
        victim = random.randrange(world_size)
        body, type_name = random.choice([(fail_on, "ValueError"), (kill_rank, "RankDied")])
        assert ranks(world_size).run_raw(body, victim)[victim].error.type_name == type_name
        assert ranks(world_size).run(gather_ranks) == [list(range(world_size))] * world_size
