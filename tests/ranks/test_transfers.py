"""Bytes from rank to rank, over the ranks' own connection and over groups of the program."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from holdfast._ranks.meeting import meeting
from holdfast._ranks.transfers import Parcel, cell_of
from holdfast.errors import ConnectionLostError, HoldfastError


def swap(rounds: int, over_a_group: bool) -> bool:
    """All ranks send each other different bytes of different lengths, several times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    group = dist.new_group(backend="gloo") if over_a_group else None
    with meeting("swap") as ranks:
        transfers = ranks.transfers(group)
        for number in range(rounds):
            sends = [Parcel(to, np.full(1 + 1000 * rank + to, 10 * rank + to + number, np.uint8)) for to in others]
            receives = [Parcel(sender, np.zeros(1 + 1000 * sender + rank, np.uint8)) for sender in others]
            transfers.exchange(sends, receives)
            for sender, content in receives:
                assert (content == 10 * sender + rank + number).all()
        transfers.exchange([], [])
    return True


@pytest.mark.parametrize("over_a_group", [False, True])
def test_all_ranks_send_each_other_bytes_at_once(ranks, over_a_group):
    assert ranks(4).run(swap, 5, over_a_group) == [True] * 4


def exchange_with_the_dead() -> list[Any]:
    """Rank 1 dies; the others notice, and still reach each other."""
    rank = dist.get_rank()
    found: list[Any] = []
    try:
        with meeting("exchange") as ranks:
            transfers = ranks.transfers()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            other = 2 - rank
            for number in range(3):
                content = np.zeros(10, np.uint8)
                try:
                    transfers.exchange(
                        [Parcel(to, np.full(10, rank + number, np.uint8)) for to in (1, other)],
                        [Parcel(1, np.zeros(10, np.uint8)), Parcel(other, content)],
                    )
                except ConnectionLostError as error:
                    found.append(("rank 1" in str(error), int(content[0]) == other + number))
    except HoldfastError:
        pass
    return found


def test_who_cannot_be_reached_does_not_keep_the_others_from_each_other(ranks):
    outcomes = ranks(3).run_raw(exchange_with_the_dead, group_timeout=20)
    assert [outcomes[rank].value for rank in (0, 2)] == [[(True, True)] * 3] * 2


def test_cells_are_ranges_of_at_most_32_ranks():
    assert [cell_of(rank, 70) for rank in (0, 31, 32, 69)] == [range(32), range(32), range(32, 64), range(64, 70)]
