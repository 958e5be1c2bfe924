"""Bytes from rank to rank, over the ranks' own connection and over groups of the program."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast._ranks.meeting import meeting
from holdfast._ranks.private_group import private_group_of
from holdfast._ranks.transfers import Parcel
from holdfast.errors import MissingRanksError
from tests.many_ranks import run_forked


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


TIMEOUT = 2.0


def exchange_with_the_stopped(over_a_group: bool, folder: Path) -> list[Any]:
    """Rank 1 stops before it sends anything. Groups of the program wait for far longer than a test may take."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo") if over_a_group else None
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    others = [other for other in range(3) if other != rank]
    error: Any = None
    began = time.monotonic()
    place = np.zeros(10, np.uint8)
    try:
        with meeting("exchange", timeout=TIMEOUT) as ranks:
            transfers = ranks.transfers(group)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            receives = [Parcel(sender, np.zeros(10, np.uint8)) for sender in others]
            transfers.exchange([Parcel(to, np.full(10, rank, np.uint8)) for to in others], receives)
            ranks.barrier()
    except MissingRanksError as raised:
        error = raised
    seconds = time.monotonic() - began
    (folder / f"over-{rank}").touch()
    if rank == 0:
        while not (folder / "over-2").exists():
            time.sleep(0.01)
        os.kill(int((folder / "pid-1").read_text()), signal.SIGCONT)
    with meeting("the next call", timeout=60) as ranks:
        ranks.transfers().exchange(
            [Parcel(to, np.full(10, rank, np.uint8)) for to in others if to == rank + 1],
            [Parcel(sender, place) for sender in others if sender == rank - 1],
        )
    return [error, seconds, int(place[0])]


@pytest.mark.parametrize("over_a_group", [False, True])
def test_a_rank_that_is_stopped_is_named_by_those_that_wait_for_its_bytes(over_a_group, tmp_path: Path):
    found = run_forked(3, exchange_with_the_stopped, over_a_group, tmp_path, group_timeout=300, deadline=60)
    for rank, (error, seconds, received) in enumerate(found):
        assert isinstance(error, MissingRanksError)
        assert error.ranks == [1]
        assert rank == 1 or seconds < TIMEOUT + 5 or os.getloadavg()[0] > os.cpu_count()
        assert received == max(rank - 1, 0)


def fail_to_send() -> list[Any]:
    """The memory of parcels that are under way when a rank is missing, and whether it is still there."""
    rank = dist.get_rank()
    group = private_group_of(None, "calls")
    with suppress(MissingRanksError), meeting("exchange", timeout=TIMEOUT) as ranks:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:
            dist.recv(torch.zeros(1), 0)  # sends nothing as long as rank 0 waits
            return []
        places = [np.zeros(10, np.uint8), np.zeros(10, np.uint8)]
        kept = [weakref.ref(place) for place in places]
        parcels = [Parcel(1, places[0]), Parcel(2, places[1])]
        del places
        with pytest.raises(MissingRanksError):
            ranks.transfers().exchange([], parcels)
        del parcels
        gc.collect()
        found = [reference() is not None for reference in kept]
        group._kept_memory.clear()
        gc.collect()
        assert kept[1]() is None  # so that it was this that kept it, and not an exception
        dist.send(torch.zeros(1), 2)
        return found
    return []


def test_memory_that_may_still_be_written_to_stays_alive():
    found = run_forked(3, fail_to_send, group_timeout=60, deadline=60, may_die=[1])
    assert found[0] == [True, True]
