"""Whether a commit by file operations that raised has surely not happened, as far as the one who tried it can prove."""

from __future__ import annotations

from holdfast.stores.filesystem import AnyPath, FileSystemBase
from holdfast.stores.unanswered import is_unanswered


def rename_has_failed(
    fs: FileSystemBase, temporary: AnyPath, final: AnyPath, content: bytes, error: BaseException
) -> bool:
    """Whether a file surely did not get its final name when the rename ended in ``error``. It is removed in any case.

    That its temporary name could be taken away is the proof: what was renamed has it no longer, and a rename that is
    still on its way finds nothing. What has the final name is looked at too, since some file systems rename by copying.
    """
    try:
        fs.rm_file(temporary)
    except Exception:
        return False
    return put_has_failed(fs, final, content, error)


def put_has_failed(fs: FileSystemBase, final: AnyPath, content: bytes, error: BaseException) -> bool:
    """Whether a file surely did not get this content when that ended in ``error``."""
    return not is_unanswered(error) and not holds(fs, final, content, if_unknown=True)


def holds(fs: FileSystemBase, path: AnyPath, content: bytes, *, if_unknown: bool) -> bool:
    """Whether a file has this content. ``if_unknown`` is the answer if it cannot be read."""
    try:
        with fs.create_stream(path, "rb") as stream:
            return bool(stream.read() == content)
    except FileNotFoundError:
        return False
    except Exception:
        return if_unknown
