"""A large local file that appears whole or not at all, and is written past the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.stores.atomic import written_atomically
from holdfast.stores.file_sink import FileSink


@contextmanager
def sink_atomically(path: str | os.PathLike[str], expected: int, memory: int) -> Iterator[FileSink]:
    """A sink whose content is durable at ``path`` when the ``with`` block ends, as with ``written_atomically``.

    ``expected`` is about how many bytes there will be, and ``memory`` how many of them may be on their way.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/file"
    >>> with sink_atomically(path, 5, 1 << 20) as sink:
    ...     sink.write(b"whole")
    >>> open(path, "rb").read()
    b'whole'
    """
    with written_atomically(path) as stream:
        descriptor = os.dup(stream.fileno())
        name = f"/proc/self/fd/{descriptor}"  # it has no other name yet
        sink = FileSink(descriptor, name, expected)
        try:
            sink.room(memory)  # the first call decides
            yield sink
            sink.finish()
            os.ftruncate(descriptor, sink.size)  # the expectation may have been too large
        except OSError as error:
            if error.filename == name:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
            raise
        finally:
            sink.close()
