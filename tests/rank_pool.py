"""A pool of live ranks: test bodies run on real processes that outlive the test.

Importing torch takes seconds, so the processes are forked from one server that has imported it, and are kept
for the whole session. Each run gives them a fresh gloo group of exactly the world size it asks for:

    def gather_ranks():                                  # at module level: the workers import it
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, dist.get_rank())
        return gathered

    def test_every_rank_sees_all(ranks):
        assert ranks(3).run(gather_ranks) == [[0, 1, 2]] * 3

Bodies, arguments and results travel by pickle. What a test patches in its own process stays unpatched on the
ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rank_worker import DUMP_STACKS, Call, Join, Leave, Request, Returned, serve

MAX_WORLD_SIZE = 4
SECONDS_TO_LEAVE = 30

# What the fork server imports once, on behalf of every worker.
_PRELOADED = [
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch.distributed.tensor.debug",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]


@dataclass(frozen=True)
class Raised:
    """Why a rank has no result."""

    type_name: str
    """The exception's class name, or `RankDied` or `DeadlineExceeded`."""
    message: str
    traceback: str = ""
    """As text, causes included. For `DeadlineExceeded`: where every thread of the rank stood."""
    exception: BaseException | None = None
    """The exception itself, if it survives pickling."""

    @property
    def is_fatal(self) -> bool:
        """Whether the rank is lost, not just its result."""
        return self.type_name in ("RankDied", "DeadlineExceeded")


@dataclass(frozen=True)
class Outcome:
    """What one rank came back with: a value, or an error."""

    rank: int
    value: Any = None
    error: Raised | None = None


class RanksFailed(Exception):
    """At least one rank did not return; the message holds every traceback."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [(outcome.rank, outcome.error) for outcome in outcomes if outcome.error]
        lines = [f"{len(failed)} of {len(outcomes)} ranks failed"]
        for rank, error in failed:
            lines += [f"--- rank {rank}: {error.type_name}: {error.message}", error.traceback]
        super().__init__("\n".join(lines))


class RankPool:
    """Live workers, started when a run first needs them. The `ranks` fixture is one of these."""

    def __init__(self, most: int = MAX_WORLD_SIZE) -> None:
        self._most = most
        # Inherited by the fork server and the workers. torch and OpenBLAS read this one when they are loaded.
        os.environ["OMP_NUM_THREADS"] = "1"
        # TCPStore asks the resolver for the names of its peers; a lost packet should not cost 5 s.
        os.environ["RES_OPTIONS"] = "timeout:1"
        # gloo needs no guess at this host's address.
        if Path("/sys/class/net/lo").exists():
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        # The job's store outlives its ranks, as it does under torchrun.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._runs = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        atexit.register(self.kill)  # a session that crashes must not wait for its workers

    def __call__(self, world_size: int) -> World:
        if not 1 <= world_size <= self._most:
            raise ValueError(f"world_size must be within 1..{self._most}, not {world_size}")
        return World(self, world_size)

    def run_raw(self, world_size: int, job: bytes, group_timeout: float | None, deadline: float) -> list[Outcome]:
        try:
            while len(self._workers) < world_size:
                self._workers.append(_Worker(self._context, len(self._workers), Path(self._scratch.name)))
            outcomes = self._run(self._workers[:world_size], job, group_timeout, _Deadline(deadline))
        except BaseException:  # whatever interrupted the run left the workers in the middle of it
            self.kill()
            raise
        if any(outcome.error and outcome.error.is_fatal for outcome in outcomes):
            self.kill()
        return outcomes

    def _run(
        self, workers: list[_Worker], job: bytes, group_timeout: float | None, deadline: _Deadline
    ) -> list[Outcome]:
        self._runs += 1
        if group_timeout is not None:
            timeout = timedelta(seconds=group_timeout)
            for worker in workers:
                worker.send(Join(worker.rank, len(workers), self._runs, self._store.port, timeout))
            # No body starts before all have joined: gloo hangs when a rank dies while others still connect to it.
            outcomes = _collect(workers, deadline)
            if any(outcome.error for outcome in outcomes):
                self._leave(workers, outcomes)
                return outcomes
        for worker in workers:
            worker.send(Call(job))
        outcomes = _collect(workers, deadline)
        self._leave(workers, outcomes)
        return outcomes

    def _leave(self, workers: list[_Worker], outcomes: list[Outcome]) -> None:
        """Let the ranks end their group. Gloo of older torches may hang then: such ranks are replaced."""
        if any(outcome.error and outcome.error.is_fatal for outcome in outcomes):
            return  # all of them will be
        for worker in workers:
            worker.send(Leave())
        if any(outcome.error for outcome in _collect(workers, _Deadline(SECONDS_TO_LEAVE))):
            self.kill()

    def kill(self) -> None:
        """Kill all workers; the next run starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def close(self) -> None:
        self.kill()
        self._scratch.cleanup()
        atexit.unregister(self.kill)


@dataclass(frozen=True)
class World:
    """The first `size` ranks of the pool."""

    pool: RankPool
    size: int

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        process_group: bool = True,
        group_timeout: float = 60.0,
        deadline: float = 120.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `body(*args, **kwargs)` on every rank; return the results by rank or raise `RanksFailed`."""
        outcomes = self.run_raw(
            body,
            *args,
            process_group=process_group,
            group_timeout=group_timeout,
            deadline=deadline,
            **kwargs,
        )
        if any(outcome.error for outcome in outcomes):
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def run_raw(
        self,
        body: Callable[..., Any],
        *args: Any,
        process_group: bool = True,
        group_timeout: float = 60.0,
        deadline: float = 120.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Like `run`, but failures are outcomes too.

        A rank that dies does not end the run: the others have until the deadline to notice and come back.
        """
        job = pickle.dumps((body, args, kwargs))
        return self.pool.run_raw(self.size, job, group_timeout if process_group else None, deadline)


class _Worker:
    """One rank's process and the pipe to it."""

    def __init__(self, context: Any, rank: int, scratch: Path) -> None:
        self.rank = rank
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._stacks = scratch / f"stacks-{rank}"
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, str(self._stacks)), name=f"rank-{rank}")
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        theirs.close()  # ours alone now: when the worker dies, the pipe ends

    def send(self, request: Request) -> None:
        try:
            self.connection.send(request)
        except OSError:  # it is dead, which shows when its answer is due
            pass

    def outcome(self) -> Outcome:
        """What the worker reported, once its connection is ready."""
        try:
            reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return Outcome(self.rank, error=Raised("RankDied", _describe_exit(self.process.exitcode)))
        if isinstance(reply, Returned):
            return Outcome(self.rank, value=pickle.loads(reply.value))
        exception = None if reply.exception is None else pickle.loads(reply.exception)
        return Outcome(self.rank, error=Raised(reply.type_name, reply.message, reply.traceback, exception))

    def late(self, deadline: _Deadline) -> Outcome:
        """The outcome of a worker that has not reported in time."""
        try:
            os.kill(self.pid, DUMP_STACKS)
            time.sleep(0.2)  # the handler writes its file at once, unless the process is stopped
        except ProcessLookupError:  # it died this very moment
            pass
        stacks = self._stacks.read_text()
        message = f"still running after {deadline.seconds:g} s"
        return Outcome(self.rank, error=Raised("DeadlineExceeded", message, stacks))

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)  # it leads a group of its own: its children go with it
        except ProcessLookupError:  # it has not got as far as that yet, or is gone
            self.process.kill()
        self.process.join(10)
        self.connection.close()


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _collect(workers: list[_Worker], deadline: _Deadline) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    pending = list(workers)
    while pending and (ready := wait([worker.connection for worker in pending], deadline.left())):
        for worker in [worker for worker in pending if worker.connection in ready]:
            outcomes[worker.rank] = worker.outcome()
            pending.remove(worker)
    for worker in pending:
        outcomes[worker.rank] = worker.late(deadline)
    return [outcomes[worker.rank] for worker in workers]


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"
