"""Runs a function in a forked process and watches every system call by which it changes the disk.

The watcher is a debugger (ptrace), so nothing depends on how the code under test does its work: threads, buffers and
file objects of any kind all end in system calls. It can record what happens, in order, with the bytes that were in a
file when it was synced; and it can SIGKILL the process just before the n-th change.

`watch` forks, and waits for any child, so it belongs on a rank of the pool without a process group.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NUMBERS = {
    "x86_64": """
        write 1 pwrite 18 writev 20 pwritev 296 pwritev2 328 sendfile 40 copy_range 326
        fsync 74 fdatasync 75 truncate 76 ftruncate 77 fallocate 285 sync 162 syncfs 306
        open 2 creat 85 openat 257 openat2 437 mkdir 83 mkdirat 258 rmdir 84
        rename 82 renameat 264 renameat2 316 unlink 87 unlinkat 263
        link 86 linkat 265 symlink 88 symlinkat 266
    """,
    "aarch64": """
        write 64 pwrite 68 writev 66 pwritev 70 pwritev2 287 sendfile 71 copy_range 285
        fsync 82 fdatasync 83 truncate 45 ftruncate 46 fallocate 47 sync 81 syncfs 267
        openat 56 openat2 437 mkdirat 34 renameat 38 renameat2 276 unlinkat 35 linkat 37 symlinkat 36
    """,
}
_TABLE = _NUMBERS.get(platform.machine(), "").split()
_SYSCALLS = {int(number): name for name, number in zip(_TABLE[::2], _TABLE[1::2], strict=True)}
# Position of the descriptor, or of the path (after that of its folder's descriptor), among the arguments.
_BY_DESCRIPTOR = {
    **dict.fromkeys(["write", "pwrite", "writev", "pwritev", "pwritev2", "sendfile"], 0),
    **dict.fromkeys(["fsync", "fdatasync", "ftruncate", "fallocate", "syncfs"], 0),
    "copy_range": 2,
}
_BY_PATH = {
    **dict.fromkeys(["open", "creat", "mkdir", "rmdir", "unlink", "truncate"], ((None, 0),)),
    **dict.fromkeys(["openat", "openat2", "mkdirat", "unlinkat"], ((0, 1),)),
    **dict.fromkeys(["rename", "link"], ((None, 0), (None, 1))),
    **dict.fromkeys(["renameat", "renameat2", "linkat"], ((0, 1), (2, 3))),
    "symlink": ((None, 1),),
    "symlinkat": ((1, 2),),
}
_FLAGS_OF_OPEN = {"open": 1, "openat": 2}
_AT_FDCWD = -100

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSGOOD, _TRACECLONE, _EXITKILL = 1, 8, 0x100000
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2


@dataclass(frozen=True)
class Change:
    """One system call that changes the disk, and came back without an error."""

    call: str
    """`write`, `fsync`, `create` (an open that makes or empties a file), `rename`, `unlink`, `mkdir`, ..."""
    path: str
    inode: int
    new_path: str | None = None
    content: bytes | None = None
    """Of an fsync of a file: what was in it."""
    is_folder: bool = False

    def __str__(self) -> str:
        names = [Path(path).name for path in (self.path, self.new_path) if path is not None]
        return f"{self.call} {' -> '.join(names)}"


@dataclass
class Watched:
    """What watched functions did."""

    changes: list[Change] = field(default_factory=list)
    """Of all processes, in order."""
    killed_before: str | None = None
    """The change that the victim died at, or None if it came to its end."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """By the position of the function."""


def require_tracing() -> None:
    """Skip the test where processes may not be traced."""
    if not _SYSCALLS:
        pytest.skip(f"no table of system calls for {platform.machine()}")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _ptrace(_TRACEME, 0) == 0 else 1)
    if os.waitpid(pid, 0)[1] != 0:
        pytest.skip("this machine does not let a process trace its child")


def watch(
    functions: Sequence[Callable[[], Any]], below: Path, *, victim: int = 0, kill_at: int | None = None
) -> Watched:
    """Run each function in a forked process of its own; watch what they change below a folder.

    With `kill_at` the process of the function `victim` is killed just before that change of its own (0 is the first).
    """
    pids = []
    for function in functions:
        pid = os.fork()
        if pid == 0:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            run_and_exit(function)
        pids.append(pid)
    return _Watcher(pids, str(below), pids[victim], kill_at).run()


def run_and_exit(function: Callable[[], Any]) -> None:
    """End a forked process after `function`, without running what the parent has registered for its own end."""
    gc.freeze()  # the parent's objects are not ours to destroy: those of gloo wait for threads that are not here
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),  # of an exit: the result
        ("arguments", ctypes.c_uint64 * 6),
        ("more", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int, address: int = 0, data: Any = 0) -> int:
    return int(_libc.ptrace(request, pid, address, data))


def _process_of(thread: int) -> int:
    status = Path(f"/proc/{thread}/status").read_text()
    return int(status.partition("Tgid:")[2].split(maxsplit=1)[0])


class _Watcher:
    def __init__(self, pids: list[int], below: str, victim: int, kill_at: int | None) -> None:
        self.pids = pids
        self.below = below
        self.victim = victim
        self.kill_at = kill_at
        self.result = Watched()
        self.seen = 0
        self.process_of: dict[int, int] = {}
        self.pending: dict[int, tuple[str, list[str], tuple[int, ...]]] = {}
        self.info = _SyscallInfo()

    def run(self) -> Watched:
        for pid in self.pids:
            os.waitpid(pid, _WALL)
            self.process_of[pid] = pid
            _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _TRACECLONE | _EXITKILL)
            self._go_on(pid)
        while len(self.result.exit_codes) < len(self.pids):
            thread, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                self._go_on(thread, self._stopped(thread, status))
            elif thread in self.pids:
                self.result.exit_codes[self.pids.index(thread)] = os.waitstatus_to_exitcode(status)
        return self.result

    def _go_on(self, thread: int, signal_number: int = 0) -> None:
        _ptrace(_SYSCALL, thread, 0, signal_number)

    def _stopped(self, thread: int, status: int) -> int:
        """Look at a stop; returns the signal that the thread is to receive."""
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(self.info), ctypes.byref(self.info))
            if self.info.op == _ENTRY:
                self._entered(thread)
            elif self.info.op == _EXIT and thread in self.pending:
                self._left(thread, *self.pending.pop(thread), result=ctypes.c_int64(self.info.number).value)
            return 0
        if number == signal.SIGTRAP and status >> 16:
            return 0  # it started a thread
        if thread not in self.process_of:
            self.process_of[thread] = _process_of(thread)
            return 0  # the stop that a new thread begins with
        return number

    def _entered(self, thread: int) -> None:
        call = _SYSCALLS.get(self.info.number)
        if call is None:
            return
        arguments = tuple(self.info.arguments)
        if call in _FLAGS_OF_OPEN and not arguments[_FLAGS_OF_OPEN[call]] & (os.O_CREAT | os.O_TRUNC):
            return
        paths = self._paths(thread, call, arguments)
        if call not in ("sync", "syncfs") and not any(path.startswith(self.below) for path in paths):
            return
        call = {"open": "create", "openat": "create", "openat2": "create", "creat": "create"}.get(call, call)
        if self.process_of[thread] == self.victim:
            if self.seen == self.kill_at:
                self.result.killed_before = " -> ".join([call, *(Path(path).name for path in paths)])
                os.kill(self.victim, signal.SIGKILL)
            self.seen += 1
        self.pending[thread] = (call, paths, arguments)

    def _paths(self, thread: int, call: str, arguments: tuple[int, ...]) -> list[str]:
        if call in _BY_DESCRIPTOR:
            return [self._of_descriptor(thread, arguments[_BY_DESCRIPTOR[call]])]
        found = []
        for folder, path in _BY_PATH.get(call, []):
            base = "" if folder is None else self._of_descriptor(thread, ctypes.c_int32(arguments[folder]).value)
            found.append(os.path.normpath(os.path.join(base, self._text(thread, arguments[path]))))
        return found

    def _of_descriptor(self, thread: int, descriptor: int) -> str:
        link = "cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}"
        try:
            return os.readlink(f"/proc/{thread}/{link}")
        except OSError:
            return ""

    def _text(self, thread: int, address: int) -> str:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            text = memory.read(4096 - address % 4096)  # up to the end of the page: the next one may not exist
            while b"\0" not in text:
                text += memory.read(4096)
        return os.fsdecode(text.partition(b"\0")[0])

    def _left(self, thread: int, call: str, paths: list[str], arguments: tuple[int, ...], result: int) -> None:
        if result < 0:
            return
        content, place = None, ""
        if call in ("create", *_BY_DESCRIPTOR):
            place = f"/proc/{thread}/fd/{result if call == 'create' else arguments[_BY_DESCRIPTOR[call]]}"
        elif call.startswith(("mkdir", "rename", "link")):
            place = paths[-1]
        status = os.stat(place) if place else None
        is_folder = status is not None and os.path.isdir(place)
        if call in ("fsync", "fdatasync") and not is_folder:
            content = Path(place).read_bytes()
        simple = call.removesuffix("2").removesuffix("at") if call.endswith(("at", "at2")) else call
        new_path = paths[1] if len(paths) > 1 else None
        inode = status.st_ino if status else 0
        self.result.changes.append(Change(simple, paths[0] if paths else "", inode, new_path, content, is_folder))
