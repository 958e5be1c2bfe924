"""What every ``torch.save`` file has beside the bytes of its tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from holdfast.formats.torch_file.description import StoredBytes
from holdfast.formats.torch_file.zip_writer import Output, ZipWriter

_ENVELOPE = 384
"""More than what an archive takes for an entry beside its content."""


def expected_size(description: bytes, entries: Sequence[StoredBytes]) -> int:
    """About how large a file will be, rather a little more."""
    return len(description) + sum(entry.nbytes + _ENVELOPE for entry in entries)


@contextmanager
def state_archive(output: Output, description: bytes) -> Iterator[ZipWriter]:
    """An archive whose entries are written in a ``with`` block. At its end the archive is complete.

    >>> import io
    >>> file = io.BytesIO()
    >>> with state_archive(file, b"\\x80\\x02K\\x07.") as archive:  # the pickle of 7
    ...     pass
    >>> torch.load(io.BytesIO(file.getvalue()))
    7
    """
    archive = ZipWriter(output)
    archive.add("data.pkl", description)
    archive.add("byteorder", sys.byteorder.encode())
    yield archive
    archive.add("version", b"3\n")
    archive.close()


def bytes_of_storage(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage that is in memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).numpy().data
