"""The program's end of a writer process: a process that saves snapshots while the program goes on.

The writer has no connection to other ranks. Whenever it needs them it asks its program, which passes the message on
over the private group: no ports, no second process group, and when the writer dies the program is still there to
report it to the other ranks, and starts a new one for the next save.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_preparation_data
from typing import Any, NamedTuple

from holdfast._background.arenas import Arena
from holdfast._background.messages import (
    Answer,
    Exchange,
    PackedError,
    SaveRequest,
    ToBeJoined,
    opened,
    pack,
)
from holdfast._ranks.exchanges import Link
from holdfast._watching.calls import Call, Update
from holdfast.errors import WriterProcessError

logger = logging.getLogger(__name__)


class PackedRequest(NamedTuple):
    """A request as it is sent: bytes, the memory that they refer to, and how to find the program's main script."""

    data: bytes
    arenas: list[Arena]
    main_script: dict[str, Any]
    state: Any
    """What the memory is lent to. Without it, the memory would be lent again while the writer reads it."""


_START = "from holdfast._background.writer_main import main; main({descriptor})"


class _ConnectionLost(Exception):
    """The other end is gone. Not to be mistaken for an error of the save, which can be an ``OSError`` too."""


@contextmanager
def _noticing_a_lost_connection() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise _ConnectionLost from error


class WriterProcess:
    """Starts the process when it is first needed, and again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process, if there is one."""
        return None if self._process is None else self._process.pid

    def save(
        self,
        request: PackedRequest,
        link: Link | None,
        destination: str,
        call: Call | None = None,
    ) -> Any:
        """Have the process carry out ``request``, and pass on its messages to the other ranks and to ``call``."""
        if self._process is not None and self._process.poll() is not None:
            logger.warning("%s; a new one is started", self._exit_description())
            self.close()
        try:
            connection = self._start() if self._connection is None else self._connection
            with _noticing_a_lost_connection():
                sizes = [arena.size for arena in request.arenas]
                connection.send_bytes(pickle.dumps((sizes, request.main_script)))
                for arena in request.arenas:
                    assert self._process is not None
                    assert arena.descriptor is not None
                    reduction.send_handle(connection, arena.descriptor, self._process.pid)
                connection.send_bytes(request.data)
            answer = self._serve(connection, link, call)
        except _ConnectionLost as lost:
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # it is about to end, if it has not
            message = (
                f"{self._exit_description()} while it saved to {destination}. The earlier checkpoint is still there, "
                "or the new one if it was committed just before. Save again: a new process is started."
            )
            exit_code = self._process.returncode
            self.close()
            raise WriterProcessError(message, exit_code=exit_code, path=destination) from lost.__cause__
        except BaseException:
            self._kill()  # what it still has to say would be taken for the answer to the next request
            raise
        return answer.get()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process, which has nothing to do by now."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection = self._process = None

    def _serve(self, connection: Connection[Any, Any], link: Link | None, call: Call | None) -> Answer:
        while True:
            with _noticing_a_lost_connection():
                message = opened(connection.recv_bytes())
            if isinstance(message, Answer):
                return message
            if isinstance(message, Update):
                assert call is not None
                call.receive(message)
                continue
            assert isinstance(message, Exchange)
            assert link is not None
            keywords = message.keywords
            if message.joins:
                keywords = {**keywords, "join": partial(self._join, connection)}
            try:
                answer = Answer(getattr(link, message.method)(message.payload, **keywords))
            except _ConnectionLost:
                raise
            except Exception as error:
                answer = Answer(error=PackedError.of(error))
            with _noticing_a_lost_connection():
                connection.send_bytes(pickle.dumps(answer))

    @staticmethod
    def _join(connection: Connection[Any, Any], payloads: list[bytes]) -> bytes:
        """Have the writer join what neighbouring ranks have: it knows how."""
        with _noticing_a_lost_connection():
            connection.send_bytes(pickle.dumps(ToBeJoined(payloads)))
            return connection.recv_bytes()

    def _start(self) -> Connection[Any, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [
                sys.executable,
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]  # as multiprocessing does
                "-c",
                _START.format(descriptor=theirs.fileno()),
            ]
            # The modules of the program must be found there too, wherever its path came from.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        return self._connection

    def _exit_description(self) -> str:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return f"the writer process {self._process.pid} closed its connection"
        if code < 0:
            return f"the writer process {self._process.pid} was killed by signal {-code}"
        return f"the writer process {self._process.pid} ended with exit code {code}"


_idle: list[WriterProcess] = []


@contextmanager
def idle_writer() -> Iterator[WriterProcess]:
    """A writer process for one save. It is kept for the next one, of whatever group."""
    try:
        writer = _idle.pop()
    except IndexError:
        writer = WriterProcess()
    try:
        yield writer
    finally:
        _idle.append(writer)


def close_idle_writers() -> None:
    """End all writer processes, at the end of the program."""
    while _idle:
        _idle.pop().close()


# A forked child has connections to its parent's writers, which are none of its business.
os.register_at_fork(after_in_child=_idle.clear)


def pack_request(request: SaveRequest, main_script: dict[str, Any]) -> PackedRequest:
    """A request in the form in which it is sent. Fails if something in it cannot be pickled."""
    return PackedRequest(*pack(request), main_script, request.state)


def find_main_script() -> dict[str, Any]:
    """How another process can import the program's main script. Not to be found any more when the program ends."""
    preparation: dict[str, Any] = get_preparation_data("holdfast-writer")
    preparation.pop("authkey", None)  # a secret of processes that listen; a writer does not
    return preparation
