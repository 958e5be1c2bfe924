"""More ranks than the pool has: processes that are forked for one body, from one that has imported torch already.

    def meet():                                          # at module level: the ranks import it
        with meeting("call") as ranks:
            return ranks.all_reduce("step", lambda: ranks.rank, sum)

    def test_forty_ranks_meet():
        assert run_forked(40, meet) == [780] * 40

They are killed when all have reported. A body may end its own process, of which the others report what they saw:
``run_forked(..., may_die=[3])``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.rank_pool import preloading_context


class RankFailed(Exception):
    """A rank raised, died or did not end; the message has its traceback."""


def run_forked(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    group_timeout: float = 60.0,
    deadline: float = 120.0,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """Call ``body(*args)`` on so many ranks of a gloo group, and return the results by rank; None of one that died.

    Of those that ``may_die`` nobody waits for a result.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    job = pickle.dumps((body, args))
    parent = preloading_context().Process(target=_fork_all, args=(size, job, group_timeout, deadline, may_die, theirs))
    parent.start()
    theirs.close()
    try:
        if not ours.poll(deadline + 30):
            raise RankFailed(f"{size} forked ranks did not end")
        outcomes = ours.recv()
    except EOFError as error:
        raise RankFailed("the process that forks the ranks died") from error
    finally:
        parent.kill()
        parent.join(10)
        ours.close()
    failed = [f"--- rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failed:
        raise RankFailed("\n".join([f"{len(failed)} of {size} ranks failed", *failed[:4]]))
    return [value for _, value in outcomes]


_port = 0


def meet_again(rank: int, size: int, name: str) -> None:
    """Leave the process group, and make a new one with those that are left."""
    dist.destroy_process_group()
    store = dist.PrefixStore(name, dist.TCPStore("localhost", _port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _fork_all(
    size: int, job: bytes, group_timeout: float, deadline: float, may_die: Sequence[int], results: Connection
) -> None:
    torch.set_num_threads(1)
    # The store outlives the ranks. It is in a process of its own: one that forks must have no threads.
    port_here, port_there = multiprocessing.Pipe(duplex=False)
    pids = [os.fork()]
    if pids[0] == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port_there.send(store.port)
        time.sleep(2 * deadline)
        os._exit(0)
    port = port_here.recv()
    pipes: list[Connection] = []
    for rank in range(size):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be(rank, size, job, port, group_timeout, theirs)
        theirs.close()
        pipes.append(ours)
        pids.append(pid)
    end = time.monotonic() + deadline
    outcomes: dict[int, tuple[bool, Any]] = dict.fromkeys(may_die, (True, None))
    while len(outcomes) < size and time.monotonic() < end:
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], end - time.monotonic()):
            rank = pipes.index(ready)  # type: ignore[arg-type]
            try:
                outcomes[rank] = pipes[rank].recv()
            except EOFError:
                outcomes[rank] = False, "it died"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # also if it is dead: nobody has waited for it
    results.send([outcomes.get(rank, (False, "it did not end")) for rank in range(size)])


def _be(rank: int, size: int, job: bytes, port: int, group_timeout: float, results: Connection) -> None:
    """One of the ranks. Never returns."""
    global _port
    _port = port
    try:
        timeout = timedelta(seconds=group_timeout)
        store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        body, args = pickle.loads(job)
        outcome = True, body(*args)
    except BaseException:
        outcome = False, traceback.format_exc()
    results.send(outcome)
    time.sleep(600)  # nobody must see this rank hang up before all have reported
    os._exit(0)
