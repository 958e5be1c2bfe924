"""Opens the files of a Hugging Face folder, whose names are the same in every save.

So a save may put another file under a name between the moment when its header was read and the moment when its data
is. Whoever read both without looking again would mix two saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from holdfast.errors import DamagedCheckpointError
from holdfast.formats.safetensors.header import read_digest
from holdfast.stores.filesystem import FileSystemBase


@contextmanager
def opened_as_described(fs: FileSystemBase, file: str, header_digest: bytes) -> Iterator[Any]:
    """The file whose header has this digest, open for reading; an error if there is another one by now."""
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(fs.create_stream(file, "rb"))
        except FileNotFoundError as error:
            raise _replaced(file, header_digest) from error
        if read_digest(stream, file) != header_digest:
            raise _replaced(file, header_digest)
        yield stream


def _replaced(file: str, header_digest: bytes) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{file} is not the file any more that it was when its header was read: a save has replaced it meanwhile, or "
        "it was removed. Try again when the save has finished.",
        file=file,
        key=None,
        expected=header_digest.hex(),
        found=None,
    )
