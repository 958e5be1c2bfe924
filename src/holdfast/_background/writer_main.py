"""The writer process: it saves what its program sends, until the program goes away."""

from __future__ import annotations

import ast
import gc
import importlib.util
import logging
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from holdfast import _settings as settings
from holdfast._background.messages import (
    Answer,
    Exchange,
    PackedError,
    SaveRequest,
    ToBeJoined,
    opened,
    unpack,
)
from holdfast._ranks.exchanges import Exchanges, Join
from holdfast._ranks.meeting import LinkedCollectives
from holdfast._ranks.shared_steps import Collectives
from holdfast._watching.calls import Update
from holdfast.errors import UnguardedScriptError


class _ProgramIsGone(BaseException):
    """There is nobody left to save for. Not an error of the save, which could look the same."""


class _RemoteLink(Exchanges):
    """Reaches the other ranks by way of the program."""

    def __init__(self, connection: Connection[Any, Any], rank: int, members: tuple[int, ...]) -> None:
        self._connection = connection
        self.rank = rank
        self.members = members

    def ask(self, payload: bytes, join: Join | None = None, *, last: bool = False) -> bytes | None:
        return cast("bytes | None", self._pass_on(Exchange("ask", payload, {}, joins=join is not None), join))

    def answer(self, payload: bytes | None, *, only: int | None = None, split: bool = False) -> bytes:
        return cast(bytes, self._pass_on(Exchange("answer", payload, {"only": only, "split": split})))

    def _pass_on(self, exchange: Exchange, join: Join | None = None) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps(exchange))
            reply: Answer | ToBeJoined = opened(self._connection.recv_bytes())
            while isinstance(reply, ToBeJoined):
                assert join is not None
                self._connection.send_bytes(join(reply.payloads))
                reply = opened(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise _ProgramIsGone from error
        return reply.get()


def main(descriptor: int) -> None:
    """Serve the program at the other end of the socket ``descriptor``."""
    # Ctrl-C goes to the whole group of processes, and often so does the notice that a machine will be taken away. The
    # program decides what it means; a save goes on until it is done, or until the program is gone.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):  # not every system has all of them
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Layouts of tensors arrive without process groups, which the loader of device meshes finds worth a warning.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    connection: Connection[Any, Any] = Connection(descriptor)
    _end_with_the_program(descriptor)
    gc.freeze()  # torch and all that comes with it is not to be looked through after each save
    with suppress(EOFError, ConnectionError, _ProgramIsGone):
        while True:
            _serve(connection)
            gc.collect()  # the mapped memory of this save must not wait for the next one


def _end_with_the_program(descriptor: int) -> None:
    """Leave at once when the program is gone: another job may have taken its place, and swept what is being written."""
    if not hasattr(select, "poll"):  # then it is noticed at the next message
        return
    gone = select.poll()
    gone.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)

    def wait_and_leave() -> None:
        gone.poll()
        os._exit(1)

    threading.Thread(target=wait_and_leave, name="holdfast-watch", daemon=True).start()


def _serve(connection: Connection[Any, Any]) -> None:
    sizes, main_script = opened(connection.recv_bytes())
    descriptors = [(reduction.recv_handle(connection), size) for size in sizes]
    data = connection.recv_bytes()
    try:
        request: SaveRequest = unpack(data, descriptors, _importer(main_script))
        answer = Answer(_carry_out(request, connection))
        reply = pickle.dumps(answer)
    except _ProgramIsGone:
        raise
    except BaseException as error:
        reply = pickle.dumps(Answer(error=PackedError.of(error)))
    finally:
        for each, _ in descriptors:
            os.close(each)
    connection.send_bytes(reply)


def _carry_out(request: SaveRequest, connection: Connection[Any, Any]) -> Any:
    ranks = (
        Collectives(None, False, 0)
        if request.members is None
        else LinkedCollectives(_RemoteLink(connection, request.rank, request.members), request.coordinator_rank)
    )
    if request.call is not None:
        request.call.send_to(partial(_send_home, connection))
    with settings.override(**request.settings):
        return request.work(ranks, request.state, request.call)


def _send_home(connection: Connection[Any, Any], update: Update) -> None:
    """Report to the program how far the save is."""
    message = pickle.dumps(update)
    try:
        connection.send_bytes(message)
    except OSError as error:
        raise _ProgramIsGone from error


def _importer(preparation: dict[str, Any]) -> Callable[[], None]:
    """Makes what the program's main script defines importable, when it is needed, as multiprocessing does."""

    def import_main() -> None:
        script = _source_of(preparation)
        if script is None or not Path(script).is_file():
            return  # a session, or a program from standard input: there is nothing to import
        if not _is_guarded(Path(script).read_text()):
            raise UnguardedScriptError(
                f"the state, the planner or the writer uses a class of the main script {script}. To get it the writer "
                "process would have to run the script, and all of it: there is no `if __name__ == '__main__':`. Add "
                "that, move the class to a module, or save with writer='thread' (AsyncCheckpointerType.THREAD in "
                "holdfast.dcp).",
                script=script,
            )
        spawn.prepare(preparation)

    return import_main


def _source_of(preparation: dict[str, Any]) -> str | None:
    """The file of the main script, or of the module that was run by its name."""
    if "init_main_from_name" in preparation:
        found = importlib.util.find_spec(preparation["init_main_from_name"])
        return None if found is None else found.origin
    path: str | None = preparation.get("init_main_from_path")
    return path


def _is_guarded(script: str) -> bool:
    """Whether a script looks at how it is run."""
    conditions = [statement.test for statement in ast.parse(script).body if isinstance(statement, ast.If)]
    names = {node.id for test in conditions for node in ast.walk(test) if isinstance(node, ast.Name)}
    return "__name__" in names
