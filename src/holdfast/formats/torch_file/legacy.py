"""Files of ``torch.save`` from before torch 1.6: pickles one behind the other, and then the elements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, cast

from holdfast.errors import DamagedCheckpointError
from holdfast.formats.torch_file.claims import Claims

_PICKLES = 5
"""A magic number, a version, what the machine was like, the state, and the keys of storages in their order."""
_SIZE_BYTES = 8
"""In front of the elements of each storage stands their number."""


def check_legacy_file(file: Path) -> None:
    """Raise if a file asks for more memory than it has bytes for, which torch would reserve before it looks."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        claims = Claims()
        bounded = cast("IO[bytes]", _Bounded(stream, size))
        try:
            for _ in range(_PICKLES):
                claims.follow(bounded)
                _compare(file, size, claims.reserved)
        except (ValueError, LookupError, TypeError) as error:
            raise _damaged(file, f"it cannot be understood: {error!s:.200}", "a torch.save file", error) from error
        left = size - stream.tell()
    largest: dict[str, int] = {}
    for storage in claims.storages:
        largest[storage.key] = max(storage.nbytes, largest.get(storage.key, 0))
    wanted = sum(largest.values()) + _SIZE_BYTES * len(largest)
    if wanted > left:
        why = f"its tensors take {wanted} bytes by what it says, and there are {left} for them"
        raise _damaged(file, why, wanted, left)


def _compare(file: Path, size: int, reserved: int) -> None:
    if reserved > size:
        raise _damaged(file, f"it asks for {reserved} bytes of memory and has {size} itself", size, reserved)


def _damaged(file: Path, why: str, expected: Any, found: Any) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{file} is damaged, or not a file that torch.save wrote: {why}. Copy it again from where it came from.",
        file=str(file),
        key=None,
        expected=expected,
        found=found if isinstance(found, int) else type(found).__name__,
    )


class _Bounded:
    """A file of which no more bytes are asked for than there are: a read reserves memory for all that is asked for."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._size = size
        self.tell = stream.tell
        self.readline = stream.readline

    def read(self, count: int) -> bytes:
        """As many bytes as there are, at most."""
        return self._stream.read(max(0, min(count, self._size - self._stream.tell())))
