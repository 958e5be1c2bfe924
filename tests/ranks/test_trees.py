"""Trees of ranks: everybody is in one, nobody has many connections, and what goes through them arrives."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._ranks import private_group
from holdfast._ranks.meeting import LinkedCollectives, meeting
from holdfast._ranks.private_group import private_group_of
from holdfast._ranks.transfers import Parcel
from holdfast._ranks.trees import LARGEST_GROUP, groups_of, strides_of
from holdfast._settings import override
from holdfast.errors import CheckpointException, RankDisagreementError, RankLeftError
from tests.many_ranks import run_forked

SIZES = st.one_of(st.integers(1, 200), st.integers(1, 20_000))


@given(SIZES, st.none() | st.integers(0, 64), st.sampled_from([2, 3, 4, 8, LARGEST_GROUP]))
def test_every_rank_but_the_first_has_one_leader_in_a_group_that_is_not_too_large(size, leaf, largest):
    strides = strides_of(size, leaf, largest)
    assert strides[-1] >= size
    for rank in {*range(0, size, max(1, size // 50)), size - 1}:
        groups = groups_of(rank, size, strides)
        assert all(rank in group.members and 1 < len(group.members) <= largest for group in groups)
        assert all(group.leader == rank for group in groups[:-1])
        assert rank == 0 or groups[-1].leader < rank
        for group in groups:
            led = [group.led_by(member) for member in group.members]
            assert [*itertools.chain(*led)] == [*range(led[0].start, led[-1].stop)]


@given(SIZES, st.none() | st.integers(0, 64))
def test_nobody_has_more_than_64_connections(size, leaf):
    strides = strides_of(size, leaf)
    for rank in (0, size // 2, size - 1):
        assert sum(len(group.members) - 1 for group in groups_of(rank, size, strides)) <= 64


def test_few_ranks_are_one_group():
    assert [list(group.members) for group in groups_of(0, 32, strides_of(32, 8))] == [list(range(32))]
    assert [len(group.members) for group in groups_of(0, 64, strides_of(64, 8))] == [8, 8]


def exchange_everything(largest: int) -> list[Any]:
    private_group.LARGEST_GROUP = largest
    group = private_group_of(None, "tree")
    rank, size = group.rank, len(group.members)
    found: list[Any] = []
    with group.round():
        for root in (0, 1, size - 1):
            mine = bytes([rank]) * rank * 100
            gathered = group.gather(mine, root)
            assert gathered == ([bytes([n]) * n * 100 for n in range(size)] if rank == root else None)
            assert group.scatter([bytes([n]) * n * 90 for n in range(size)] if rank == root else None, root) == (
                bytes([rank]) * rank * 90
            )
            assert group.broadcast(b"from the root" if rank == root else b"not this", root) == b"from the root"
            assert group.broadcast(b"x" * 5000 if rank == root else None, root) == b"x" * 5000
        assert group.all_gather(bytes([rank])) == [bytes([n]) for n in range(size)]
        joined = group.combine(f"{rank}".encode(), lambda parts: b"(" + b",".join(parts) + b")")
        found.append(joined.decode())
        steps = LinkedCollectives(group)
        assert steps.combine("sum", lambda: rank, sum) == size * (size - 1) // 2
        assert steps.combine("order", lambda: [rank], lambda parts: [*itertools.chain(*parts)]) == [*range(size)]
        assert steps.reduce_scatter("each", lambda: rank, lambda values: [value * 2 for value in values]) == rank * 2
        assert steps.all_reduce("all", lambda: rank, max) == size - 1
        with steps.step("nothing fails"):
            pass
    return [*found, sum(len(tree.members) - 1 for tree, _ in group._groups or ())]


@pytest.mark.parametrize(
    ("size", "largest", "order"),
    [
        (8, 3, "(((0,1,2),(3,4,5),(6,7)))"),
        (11, 2, None),
        (12, 4, "((0,1,2,3),(4,5,6,7),(8,9,10,11))"),
    ],
)
def test_everything_arrives_through_trees_of_several_levels(size, largest, order):
    found = run_forked(size, exchange_everything, largest)
    assert len({joined for joined, _ in found}) == 1
    assert [int(digit) for digit in found[0][0].replace("(", "").replace(")", "").split(",")] == list(range(size))
    assert max(connections for _, connections in found) <= 2 * largest


def fail_in_trees(failing: list[int]) -> list[Any]:
    private_group.LARGEST_GROUP = 3
    found: list[Any] = []
    rank = torch.distributed.get_rank()

    def fail() -> int:
        if rank in failing:
            raise KeyError(f"of {rank}")
        return 1

    for take in (
        lambda ranks: ranks.own_error_first("step", fail),
        lambda ranks: ranks.combine("step", fail, sum),
        lambda ranks: ranks.all_reduce("step", fail, sum),
        lambda ranks: ranks.reduce_scatter("step", fail, list),
    ):
        try:
            with meeting("call") as ranks:
                take(ranks)
        except KeyError as error:
            found.append(error.args[0])
    try:
        with private_group_of(None, "calls").round() as link, LinkedCollectives(link).step("step"):
            fail()
    except CheckpointException as error:
        found.append([*error.failures])
    try:
        with meeting("call") as ranks:
            if rank == failing[-1]:
                raise OSError("this rank leaves")
            ranks.barrier()
    except RankLeftError as error:
        found.append(error.ranks)
    except OSError:
        found.append([rank])
    try:
        with meeting(f"call {rank // 5}"):
            pass
    except RankDisagreementError as error:
        found.append(sorted(set(error.views.values())))
    with meeting("next") as ranks:
        found.append(ranks.combine("sum", lambda: 1, sum))
    return found


def test_the_failure_of_the_lowest_rank_reaches_all_through_the_tree():
    found = run_forked(8, fail_in_trees, [4, 5, 7])
    for rank, outcome in enumerate(found):
        own = f"of {rank}" if rank in (4, 5, 7) else "of 4"
        assert outcome == [own, *["of 4"] * 3, [4, 5, 7], [7], ["call 0", "call 1"], 8]


def fail_everywhere() -> list[Any]:
    try:
        with private_group_of(None, "calls").round() as link, LinkedCollectives(link).step("step"):
            raise KeyError("x" * 100_000_0)
    except CheckpointException as error:
        texts = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
        return [len(texts), "failed too" in texts[16], sum(map(len, texts))]
    return []


def test_of_many_failures_only_some_travel():
    for count, is_short, size in run_forked(20, fail_everywhere):
        assert count == 20
        assert is_short
        assert size < 2_000_000


def test_forty_ranks_are_two_groups_and_one_of_their_leaders():
    found = run_forked(40, exchange_everything, LARGEST_GROUP)
    assert [connections for _, connections in found] == [32, *[31] * 31, 8, *[7] * 7]


def leaves_by_machine(names: list[str]) -> list[int]:
    private_group.LARGEST_GROUP = 6
    group = private_group_of(None, "machines")
    with override(machine=names[group.rank]), group.round():
        group.combine(b"", b"".join)
        return [*group.neighbours]


def test_the_ranks_of_a_machine_that_the_settings_name_are_a_group():
    found = run_forked(12, leaves_by_machine, [f"machine-{rank // 4}" for rank in range(12)])
    assert found == [[*range(rank // 4 * 4, rank // 4 * 4 + 4)] for rank in range(12)]
    assert run_forked(12, leaves_by_machine, [""] * 12)[0] == [*range(6)]


def pass_bytes_around() -> list[Any]:
    """Every rank sends to every neighbour, several at a time."""
    private_group.LARGEST_GROUP = 3
    group = private_group_of(None, "bytes")
    with group.round():
        group.combine(b"", b"".join)
        others = [rank for rank in group.neighbours if rank != group.rank]
        receives = [Parcel(rank, np.zeros(1000 + n, np.uint8)) for rank in others for n in range(3)]
        sends = [Parcel(rank, np.full(1000 + n, group.rank * 10 + n, np.uint8)) for rank in others for n in range(3)]
        group.exchange(sends, receives)
        return [
            (rank, [np.unique(content).tolist() for sender, content in receives if sender == rank]) for rank in others
        ]


def test_neighbours_send_each_other_bytes():
    for rank, found in enumerate(run_forked(8, pass_bytes_around)):
        leaf = rank // 3 * 3
        others = [n for n in range(leaf, min(leaf + 3, 8)) if n != rank]
        assert found == [(n, [[n * 10], [n * 10 + 1], [n * 10 + 2]]) for n in others]


def hang_up_after_another_one() -> bool:
    """Rank 0 hangs up; then rank 2 does, which waits for rank 1."""
    private_group.LARGEST_GROUP = 4
    group = private_group_of(None, "hanging up")
    with group.round():
        group.combine(b"", b"".join)
        ((_, gloo),) = group._groups or ()
        if group.rank == 0:
            gloo.hang_up()
        torch.distributed.barrier()
        ended = threading.Event()
        if group.rank == 2:
            wait = gloo.receive_bytes(1, torch.empty(10, dtype=torch.uint8))

            def wait_and_say_so() -> None:
                with contextlib.suppress(Exception):
                    wait()
                ended.set()

            threading.Thread(target=wait_and_say_so, daemon=True).start()
            gloo.hang_up()
            ended.wait(20)
        torch.distributed.barrier()
        return ended.is_set()


def test_who_hangs_up_is_woken_from_any_wait_though_another_one_has_hung_up_before():
    assert run_forked(3, hang_up_after_another_one) == [False, False, True]
