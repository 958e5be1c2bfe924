"""Which ranks are on the same machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import xxhash

from holdfast import _settings as settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_digest() -> bytes:
    """16 bytes that are the same for all processes of a machine, in whichever containers, and for no other machine.

    >>> machine_digest() == machine_digest(), len(machine_digest())
    (True, 16)
    >>> with settings.override(machine="left"):
    ...     machine_digest() == machine_digest() != xxhash.xxh3_128_digest(b"left")
    True
    """
    given = settings.current().machine
    if given:
        return xxhash.xxh3_128_digest(b"called " + given.encode())
    name = platform.node()
    with suppress(OSError):  # machines that were cloned have the same name, and were started at different times
        name = _BOOT_ID.read_text()
    return xxhash.xxh3_128_digest(name.encode())


def ranks_per_machine(names: Sequence[str]) -> int:
    """How many ranks are on the machine of the first one, given the names of their machines; 0 if it has none.

    >>> ranks_per_machine(["a", "a", "b", "b"]), ranks_per_machine(["", ""])
    (2, 0)
    """
    return sum(1 for _ in takewhile(names[0].__eq__, names)) if names[0] else 0
