"""Bytes from rank to rank, over the ranks' own connection and over groups of the program."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch.distributed as dist

from holdfast._ranks.meeting import meeting
from holdfast._ranks.transfers import Parcel
from holdfast.errors import MissingRanksError


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


def exchange_with_the_dead() -> str:
    """Rank 1 dies while the others wait for bytes of it and of each other."""
    rank = dist.get_rank()
    with meeting("exchange") as ranks:
        transfers = ranks.transfers()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        receives = [Parcel(sender, np.zeros(10, np.uint8)) for sender in (1, 2 - rank)]
        with pytest.raises(MissingRanksError) as raised:
            transfers.exchange([Parcel(to, np.ones(10, np.uint8)) for to in (1, 2 - rank)], receives)
        return str(raised.value)
    return ""


def test_a_rank_that_dies_is_named_by_those_that_wait_for_its_bytes(ranks):
    outcomes = ranks(3).run_raw(exchange_with_the_dead, group_timeout=20)
    for rank in (0, 2):
        assert "rank 1 " in (outcomes[rank].value or str(outcomes[rank].error))
