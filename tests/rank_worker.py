"""The worker side of `tests.rank_pool`: a process that runs one body after the other until its pipe ends."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests.torches import backends_in_use, clear_sharding_cache

DUMP_STACKS = signal.SIGUSR2


@dataclass(frozen=True)
class Join:
    """Form a process group with the other ranks."""

    rank: int
    world_size: int
    run: int
    """A number that tells this run's keys in the store from those of other runs."""
    store_port: int
    timeout: timedelta


@dataclass(frozen=True)
class Call:
    """Call a body with its arguments."""

    job: bytes
    """A pickled `(body, args, kwargs)`."""


@dataclass(frozen=True)
class Leave:
    """All ranks have reported: the process group may go."""


@dataclass(frozen=True)
class Returned:
    value: bytes


@dataclass(frozen=True)
class Failed:
    type_name: str
    message: str
    traceback: str
    exception: bytes | None


Request = Join | Call | Leave
Reply = Returned | Failed


def serve(connection: Connection, stacks_path: str) -> None:
    os.setsid()  # Ctrl-C is for the session, which then ends us; our children share our group and our end
    # Bodies live in test modules: their asserts show values, as they do in a test.
    install_importhook(get_config())
    with open(stacks_path, "w") as stacks:
        faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(connection, requests), name="listen", daemon=True).start()
        while True:
            request = requests.get()
            if isinstance(request, Leave):
                _leave()
                connection.send_bytes(pickle.dumps(Returned(pickle.dumps(None))))
            else:
                connection.send_bytes(pickle.dumps(_answer(request)))


def _listen(connection: Connection, requests: queue.SimpleQueue[Request]) -> None:
    """Pass requests on to the main thread, where bodies run. When the session ends, we do, even mid-body."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _answer(request: Join | Call) -> Reply:
    try:
        value = None
        if isinstance(request, Join):
            _join(request)
        else:
            value = _call(request)
        # A rank that returned keeps its group until all have reported, so that nobody sees it hang up early.
        return Returned(pickle.dumps(value))
    except BaseException as error:
        # A rank that raised leaves at once: those who wait for it in a collective fail now, not at a timeout.
        failed = Failed(type(error).__name__, str(error), traceback.format_exc(), _pickled(error))
        _leave()
        return failed
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _join(request: Join) -> None:
    store = _job_store(request.store_port)
    store.set_timeout(request.timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run-{request.run}", store),
        rank=request.rank,
        world_size=request.world_size,
        timeout=request.timeout,
    )


def _call(request: Call) -> Any:
    torch.manual_seed(0)
    body, args, kwargs = pickle.loads(request.job)
    return body(*args, **kwargs)


@functools.cache
def _job_store(port: int) -> dist.TCPStore:
    return dist.TCPStore("localhost", port, is_master=False)


def _leave() -> None:
    if dist.is_initialized():
        backends = backends_in_use()
        dist.destroy_process_group()
        # Of older torches a group joins its threads while it holds the interpreter's lock, for which a thread may wait
        # that frees the tensors of the last collective. What was taken from it here lets go of the lock first.
        del backends
    clear_sharding_cache()  # or the next run would get a mesh of this one, whose groups are gone


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data
