"""A Python that has imported torch already: programs start in milliseconds instead of seconds.

`[*warm_python(), "-c", program, argument]` is a command for `subprocess`, like the same with
`sys.executable`; scripts will do, too. Behind it, a process that has imported torch (and nothing of Holdfast) is forked
for every program, which runs as `__main__` with the standard streams, the folder and the environment of the command.
It ends as every interpreter ends: exit functions, threads and exit status are its own. Signals to the command reach it.

What is about imports of torch or about the memory of the process needs `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_HOST = "from tests.warm_python import next_program; exec(*next_program({path!r}))"

# Started without the `site` module: it must be up in no time.
_COMMAND = """
import json, os, signal, socket, sys
passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
host = socket.socket(socket.AF_UNIX)
host.connect(sys.argv[1])
request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
socket.send_fds(host, [b"+"], [0, 1, 2])
answers = host.makefile("rw")
answers.write(json.dumps(request) + "\\n")
answers.flush()
program = int(answers.readline())
for number in passed_on:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(program, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
status = int(answers.readline() or 255)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> list[str]:
    """The beginning of a command. The process that is forked is started with the first one."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return [sys.executable]
    folder = tempfile.mkdtemp(prefix="warm-python-")
    path = f"{folder}/socket"
    owner = os.getpid()
    ready, theirs = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST.format(path=path), str(theirs)],
        env=environment,
        pass_fds=[theirs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the session, which then ends us
    )
    os.close(theirs)

    def end() -> None:
        if os.getpid() == owner:  # and not a child that was forked, whose end is not ours
            host.kill()
            host.wait()
            shutil.rmtree(folder)

    atexit.register(end)
    assert os.read(ready, 1), "the process that is forked has not started"
    os.close(ready)
    return [sys.executable, "-I", "-S", "-c", _COMMAND, path]


def next_program(path: str) -> tuple[types.CodeType, dict[str, Any]]:
    """Fork for every command. Returns in the forks only, with what they shall execute."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(int(sys.argv[1]), b"+")
    os.close(int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile("r").readline())
        program = os.fork()
        if program:
            _watch(program, connection)
        connection.close()
        return _prepared(request, descriptors)


def _watch(program: int, connection: socket.socket) -> None:
    """Tell the command which process it is, and how that ended. If the command is killed, so is the program."""
    connection.sendall(f"{program}\n".encode())
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    try:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    except OSError:  # nobody wants to know
        pass
    os._exit(0)


def _prepared(request: dict[str, Any], descriptors: list[int]) -> tuple[types.CodeType, dict[str, Any]]:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *arguments = request["arguments"]
    main = types.ModuleType("__main__")
    if first == "-c":
        name, source = "<string>", arguments.pop(0)
        sys.path[0] = ""
    else:
        name, source = first, Path(first).read_text()
        main.__file__ = first
        sys.path[0] = os.path.dirname(os.path.abspath(first))
    sys.argv = ["-c" if first == "-c" else first, *arguments]
    _FORMER_MAIN.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    return compile(source, name, "exec", dont_inherit=True), main.__dict__


_FORMER_MAIN: list[types.ModuleType] = []
"""Its names must live as long as the process, which executes its code."""
