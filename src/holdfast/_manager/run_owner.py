"""Which process a run belongs to, and whether that process is still alive.

A number of a process is used again by another one some day, so the moment at which it started counts too. Both mean
something only where they come from: on the same boot of the same machine, and in the same space of process numbers.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

Life = Literal["alive", "dead", "unknown"]

_TOO_LARGE = 1 << 32
"""No system numbers its processes so."""
_START = 19
"""Of the fields that /proc/<pid>/stat has behind the name of the program: when it started, in ticks since the boot."""


@dataclass(frozen=True)
class Owner:
    """A job that saves into a folder."""

    token: str
    """Drawn by the job. Two managers in one process have different ones."""
    host: str
    pid: int
    started: str
    """When the process started, as its machine counts; empty where that is unknown."""
    place: str
    """Where such numbers can be compared."""
    since: str
    """When it began to own the run."""
    root: tuple[str, ...] = ()
    """The marks of the folder that it owns; none if they are not known."""

    @staticmethod
    def this_process(token: str, root: tuple[str, ...] = ()) -> Owner:
        """This process, from now on.

        >>> Owner.this_process("00c0ffee").life()
        'alive'
        """
        pid = os.getpid()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        started = ""
        with suppress(OSError):
            started = _start_of(pid) or ""
        return Owner(token, socket.gethostname(), pid, started, _this_place(), now, root)

    @staticmethod
    def from_json(stored: Any) -> Owner | None:
        """What ``to_json`` gave; None for anything else."""
        names = Owner.__dataclass_fields__.keys() - {"root"}
        if not isinstance(stored, dict) or not names <= stored.keys():
            return None
        values = {name: stored[name] for name in names}
        pid = values.pop("pid")
        if (
            type(pid) is not int
            or not 1 <= pid < _TOO_LARGE
            or not all(isinstance(value, str) for value in values.values())
        ):
            return None
        root = stored.get("root", [])
        if not isinstance(root, list) or not all(isinstance(mark, str) for mark in root):
            return None
        return Owner(pid=pid, root=tuple(root), **values)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "root": list(self.root)}

    def owns(self, root: tuple[str, ...]) -> bool:
        """Whether it owns the folder with these marks, and not one of which that is a copy."""
        return not self.root or not root or not set(self.root).isdisjoint(root)

    def life(self) -> Life:
        """Whether the process is alive, as far as that can be known from here."""
        if self.place != _this_place():
            return "unknown"
        if not self.started:
            return "alive" if _answers(self.pid) else "dead"
        try:
            return "alive" if _start_of(self.pid) == self.started else "dead"
        except OSError:
            return "unknown"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _this_place() -> str:
    """The same for all processes that see each other under the same numbers, until the machine boots again."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process started; None if there is none, or nothing but its exit code is left of it.

    Raises if that is unknown, as of a process of somebody else on a machine that hides those.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name of the program comes before, and may hold anything
    return None if fields[0] in ("Z", "X") else fields[_START]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OverflowError:  # a number of another system
        return False
    return True
